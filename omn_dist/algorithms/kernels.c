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

/* The operations of torch.optim.AdamW(foreach=False, fused=False) before and after the square root of the second moment, which
 * torch takes from a library that does not round like sqrtf. */
CLONED void omn_adamw_moments(
    long num_elements, const float *restrict gradient, float *restrict first, float *restrict second, float first_weight,
    float second_coefficient, float second_weight
) {
    for (long index = 0; index < num_elements; index++) {
        const float new = gradient[index];
        first[index] = lerp(first[index], new, first_weight);
        second[index] = fmaf(second_weight * new, new, second[index] * second_coefficient);
    }
}

CLONED void omn_adamw_parameter(
    long num_elements, float *restrict parameter, const float *restrict first, const float *restrict root, float kept,
    float correction, float epsilon, float step_size
) {
    for (long index = 0; index < num_elements; index++) {
        const float denominator = root[index] / correction + epsilon;
        parameter[index] = parameter[index] * kept + step_size * first[index] / denominator;
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
