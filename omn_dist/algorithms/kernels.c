/* What torch does on CPU shards with a pass over memory for every operation, in one pass, with the bits of its operations: every
 * rounding happens where torch's vector kernels have it, and a multiply-add is fused exactly where theirs is. See kernels.py,
 * which checks that once in a process.
 *
 * Rectangles are row-major; a stride is the distance of two rows in elements. Nothing overlaps but what is named twice.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__)
/* torch's kernels fuse multiply-adds from AVX2 on; kernels.py asks for no less. */
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

enum rule { SUM = 0, EMA = 1 };
enum width { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t rounded = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return value != value ? 0x7fc0 : rounded;
}

INLINE float from_bfloat16(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* torch.lerp: from the end that is nearer, so that the weight is one half at most. */
INLINE float lerp(float start, float end, float weight) {
    return fabsf(weight) < 0.5f ? fmaf(weight, end - start, start) : fmaf(weight - 1.0f, end - start, end);
}

INLINE void direction_row(
    const float *restrict gradient, float *restrict momentum, void *restrict out, long num_columns, float coefficient,
    float weight, const enum rule rule, const int nesterov, const int commit, const enum width width
) {
    for (long column = 0; column < num_columns; column++) {
        const float new = gradient[column], old = momentum[column];
        const float updated = rule == EMA ? lerp(old, new, weight) : old * coefficient + new;
        float direction = updated;
        if (nesterov) direction = rule == EMA ? lerp(new, updated, coefficient) : fmaf(updated, coefficient, new);
        if (commit) momentum[column] = updated;
        if (width == BFLOAT16) ((uint16_t *)out)[column] = to_bfloat16(direction);
        else ((float *)out)[column] = direction;
    }
}

/* `weight` is 1 - coefficient, rounded by the caller, who has both in double. */
CLONED void omn_direction(
    long num_rows, long num_columns, const float *gradient, long gradient_stride, float *momentum, long momentum_stride,
    char *out, long out_stride, int width, float coefficient, float weight, int rule, int nesterov, int commit
) {
    const long row_bytes = out_stride * (width == BFLOAT16 ? 2 : 4);
    for (long row = 0; row < num_rows; row++) {
        /* Every variant is a loop of its own, or the compiler would not use vectors. */
#define VARIANT(RULE, NESTEROV, COMMIT, WIDTH) ((RULE) << 3 | (NESTEROV) << 2 | (COMMIT) << 1 | (WIDTH))
#define CASE(V)                                                                                                    \
    case V:                                                                                                        \
        direction_row(                                                                                             \
            gradient, momentum, out, num_columns, coefficient, weight, (V) >> 3, (V) >> 2 & 1, (V) >> 1 & 1, (V) & 1 \
        );                                                                                                         \
        break;
        switch (VARIANT(rule, nesterov, commit, width)) {
            CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
            CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15)
        }
        gradient += gradient_stride;
        momentum += momentum_stride;
        out += row_bytes;
    }
}

INLINE void apply_row(
    float *restrict parameter, const void *restrict update, long num_columns, float kept, float step_size, enum width width
) {
    for (long column = 0; column < num_columns; column++) {
        const float by = width == BFLOAT16 ? from_bfloat16(((const uint16_t *)update)[column]) : ((const float *)update)[column];
        parameter[column] = fmaf(by, step_size, parameter[column] * kept);
    }
}

CLONED void omn_apply(
    long num_rows, long num_columns, float *parameter, long parameter_stride, const char *update, long update_stride, int width,
    float kept, float step_size
) {
    const long row_bytes = update_stride * (width == BFLOAT16 ? 2 : 4);
    for (long row = 0; row < num_rows; row++) {
        apply_row(parameter, update, num_columns, kept, step_size, width);
        parameter += parameter_stride;
        update += row_bytes;
    }
}

typedef uint16_t lanes __attribute__((vector_size(16)));
enum { LANES = 8, TILE = 128 };

INLINE lanes low_halves(lanes a, lanes b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE lanes high_halves(lanes a, lanes b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }

/* Eight rows of eight: three perfect shuffles of all 64 numbers. */
INLINE void transpose_block(const uint16_t *source, long source_stride, uint16_t *target, long target_stride) {
    lanes rows[LANES], shuffled[LANES];
    for (int row = 0; row < LANES; row++) memcpy(&rows[row], source + row * source_stride, sizeof(lanes));
    for (int shuffle = 0; shuffle < 3; shuffle++) {
        for (int row = 0; row < LANES / 2; row++) {
            shuffled[2 * row] = low_halves(rows[row], rows[row + LANES / 2]);
            shuffled[2 * row + 1] = high_halves(rows[row], rows[row + LANES / 2]);
        }
        memcpy(rows, shuffled, sizeof rows);
    }
    for (int row = 0; row < LANES; row++) memcpy(target + row * target_stride, &rows[row], sizeof(lanes));
}

/* target[column][row] <- source[row][column] of two-byte elements, tile by tile for the sake of the cache. */
CLONED void omn_transpose(
    long num_rows, long num_columns, const uint16_t *source, long source_stride, uint16_t *target, long target_stride
) {
    for (long top = 0; top < num_rows; top += TILE) {
        const long bottom = top + TILE < num_rows ? top + TILE : num_rows;
        for (long left = 0; left < num_columns; left += TILE) {
            const long right = left + TILE < num_columns ? left + TILE : num_columns;
            const long last_row = bottom - (bottom - top) % LANES, last_column = right - (right - left) % LANES;
            for (long column = left; column < last_column; column += LANES)
                for (long row = top; row < last_row; row += LANES)
                    transpose_block(
                        source + row * source_stride + column, source_stride, target + column * target_stride + row, target_stride
                    );
            for (long row = top; row < bottom; row++)
                for (long column = row < last_row ? last_column : left; column < right; column++)
                    target[column * target_stride + row] = source[row * source_stride + column];
        }
    }
}

#if defined(__x86_64__)
#include <immintrin.h>
#define VECTOR __attribute__((target("avx512f")))

/* torch.sqrt is the root of MKL's vector library where torch has that, and correctly rounded elsewhere. MKL has two. */
enum root { FROM_14_BITS = 0, FROM_12_BITS = 1, CORRECTLY_ROUNDED = 2 };

/* On Intel's CPUs with AVX-512: the 14-bit reciprocal and one step of Newton from below, with the scale moved away from where the
 * remainder would be denormal. 1 in 170 is not the nearest number. */
VECTOR static inline __m512 root_from_14_bits(__m512 value) {
    const __m512 zero = _mm512_setzero_ps();
    const __mmask16 small = _mm512_cmp_ps_mask(value, _mm512_set1_ps(0x1p-60f), _CMP_LT_OQ);
    const __mmask16 exact = _mm512_cmp_ps_mask(value, zero, _CMP_EQ_OQ) | _mm512_cmp_ps_mask(value, _mm512_set1_ps(INFINITY), _CMP_EQ_OQ);
    const __m512 scaled = _mm512_mask_mul_ps(value, small, value, _mm512_set1_ps(0x1p96f));
    const __m512 reciprocal = _mm512_rsqrt14_ps(scaled);
    const __m512 first = _mm512_mul_ps(scaled, reciprocal);
    const __m512 remainder = _mm512_fnmadd_ps(first, first, scaled);
    const __m512 second = _mm512_fmadd_ps(remainder, _mm512_mul_ps(reciprocal, _mm512_set1_ps(0.5f)), first);
    return _mm512_mask_mov_ps(_mm512_mask_mul_ps(second, small, second, _mm512_set1_ps(0x1p-48f)), exact, value);
}

/* On other CPUs: the 12-bit reciprocal and two steps, nothing fused; 1 in 6 is not the nearest number. Denormal numbers and those
 * within one in 2000 of the largest are rounded correctly. */
VECTOR static inline __m512 root_from_12_bits(__m512 value) {
    const __m512 half = _mm512_set1_ps(0.5f);
    const __m256 low = _mm256_rsqrt_ps(_mm512_castps512_ps256(value));
    const __m256 high = _mm256_rsqrt_ps(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(value), 1)));
    const __m512 reciprocal = _mm512_castpd_ps(
        _mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(low)), _mm256_castps_pd(high), 1)
    );
    const __m512 first = _mm512_mul_ps(value, reciprocal), half_reciprocal = _mm512_mul_ps(reciprocal, half);
    const __m512 error = _mm512_sub_ps(half, _mm512_mul_ps(first, half_reciprocal));
    const __m512 second = _mm512_add_ps(_mm512_mul_ps(first, error), first);
    const __m512 slope = _mm512_add_ps(_mm512_mul_ps(half_reciprocal, error), half_reciprocal);
    const __m512 remainder = _mm512_sub_ps(value, _mm512_mul_ps(second, second));
    const __m512 third = _mm512_add_ps(_mm512_mul_ps(remainder, slope), second);
    const __m512i from_smallest_normal = _mm512_sub_epi32(_mm512_castps_si512(value), _mm512_set1_epi32(0x00800000));
    const __mmask16 ordinary = _mm512_cmple_epu32_mask(from_smallest_normal, _mm512_set1_epi32(0x7f7ff000 - 0x00800000));
    return ordinary == 0xffff ? third : _mm512_mask_mov_ps(_mm512_sqrt_ps(value), ordinary, third);
}

struct adamw {
    float kept, first_weight, second_coefficient, second_weight, correction, epsilon, step_size;
};

/* The operations of torch.optim.AdamW(foreach=False, fused=False) in their order, on the lanes of the mask. */
VECTOR static inline __attribute__((always_inline)) void adamw_lanes(
    const __mmask16 mask, float *parameter, const float *gradient, float *first, float *second, const struct adamw by,
    const enum root root
) {
    const int near = fabsf(by.first_weight) < 0.5f;
    const __m512 weight = _mm512_set1_ps(near ? by.first_weight : by.first_weight - 1.0f);
    const __m512 new = _mm512_maskz_loadu_ps(mask, gradient), old = _mm512_maskz_loadu_ps(mask, first);
    const __m512 mean = _mm512_fmadd_ps(weight, _mm512_sub_ps(new, old), near ? old : new);
    const __m512 kept_square = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, second), _mm512_set1_ps(by.second_coefficient));
    const __m512 square = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(by.second_weight), new), new, kept_square);
    const __m512 of_square = root == FROM_14_BITS   ? root_from_14_bits(square)
                             : root == FROM_12_BITS ? root_from_12_bits(square)
                                                    : _mm512_sqrt_ps(square);
    const __m512 denominator =
        _mm512_add_ps(_mm512_div_ps(of_square, _mm512_set1_ps(by.correction)), _mm512_set1_ps(by.epsilon));
    const __m512 moved = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(by.step_size), mean), denominator);
    const __m512 stays = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, parameter), _mm512_set1_ps(by.kept));
    _mm512_mask_storeu_ps(first, mask, mean);
    _mm512_mask_storeu_ps(second, mask, square);
    _mm512_mask_storeu_ps(parameter, mask, _mm512_add_ps(stays, moved));
}

struct shard {
    long num_elements;
    float *parameter, *first, *second;
    const float *gradient;
};

VECTOR static inline __attribute__((always_inline)) void adamw(
    const struct shard *shard, const struct shard *end, const struct adamw by, const enum root root
) {
    for (; shard < end; shard++) {
        long index = 0;
#define ON(MASK) adamw_lanes(MASK, shard->parameter + index, shard->gradient + index, shard->first + index, shard->second + index, by, root)
        for (; index + 16 <= shard->num_elements; index += 16) ON(0xffff);
        if (index < shard->num_elements) ON((__mmask16)((1u << (shard->num_elements - index)) - 1));
    }
}

VECTOR void omn_adamw(const struct shard *shards, long num_shards, const struct adamw *by, int root) {
    const struct shard *end = shards + num_shards;
    switch (root) {
        case FROM_14_BITS: adamw(shards, end, *by, FROM_14_BITS); break;
        case FROM_12_BITS: adamw(shards, end, *by, FROM_12_BITS); break;
        case CORRECTLY_ROUNDED: adamw(shards, end, *by, CORRECTLY_ROUNDED); break;
    }
}
#endif
