/* Passes over CPU shards. Torch makes one pass for each operation; a function here makes one for
 * several, with torch's results to the bit: it rounds where torch's vector kernels round, and fuses
 * a multiply-add where they do. samples.py compares both when an optimizer is built.
 *
 * Matrices are row-major; a stride is the distance of two rows in elements. No two arguments
 * overlap.
 */
#if defined(__x86_64__) && defined(__GNUC__)
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* Each function is built twice. library.py calls the variant for the features in features.c. */
#define VARIANTS(NAME, PARAMETERS, ARGUMENTS)                                                                              \
    __attribute__((target("avx2,fma"))) void omn_##NAME##_avx2 PARAMETERS { NAME ARGUMENTS; }                              \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))) void omn_##NAME##_avx512 PARAMETERS { NAME ARGUMENTS; }

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
INLINE void direction(
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

INLINE void apply(
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

struct adamw_shard {
    long num_elements;
    float *parameter, *first, *second;
    const float *gradient;
};

/* A place in an array of shards: the next element of a walk over them. */
struct position {
    const struct adamw_shard *shard;
    long element;
};

struct adamw {
    float kept, first_weight, second_coefficient, second_weight, correction, eps, step_size;
};

/* The operations of torch.optim.AdamW(foreach=False, fused=False), in their order. Between the two
 * functions the caller takes the root of the second moment with torch's own operation, whose
 * library does not round it correctly. */
INLINE void moments_of(
    const float *restrict gradient, float *restrict first, float *restrict second, float *restrict block, long count,
    const struct adamw by
) {
    for (long index = 0; index < count; index++) {
        const float new = gradient[index];
        first[index] = lerp(first[index], new, by.first_weight);
        const float square = fmaf(by.second_weight * new, new, second[index] * by.second_coefficient);
        second[index] = square;
        block[index] = square;
    }
}

INLINE void update_of(
    float *restrict parameter, const float *restrict first, const float *restrict roots, long count, const struct adamw by
) {
    for (long index = 0; index < count; index++) {
        const float denominator = roots[index] / by.correction + by.eps;
        parameter[index] = parameter[index] * by.kept + by.step_size * first[index] / denominator;
    }
}

/* CALL on the next `count` elements, shard by shard; in `block` they are side by side. */
#define WALK(CALL)                                                                                         \
    while (count > 0) {                                                                                    \
        const struct adamw_shard *shard = at->shard;                                                       \
        const long from = at->element, left = shard->num_elements - from, now = left < count ? left : count; \
        CALL;                                                                                              \
        block += now;                                                                                      \
        count -= now;                                                                                      \
        at->element += now;                                                                                \
        if (now == left) *at = (struct position){shard + 1, 0};                                            \
    }

/* Moves both moments, and copies the second ones to `block`. */
INLINE void adamw_moments(struct position *at, long count, float *block, const struct adamw *by) {
    WALK(moments_of(shard->gradient + from, shard->first + from, shard->second + from, block, now, *by))
}

/* Moves the parameters; `block` has the roots of the second moments. */
INLINE void adamw_update(struct position *at, long count, float *block, const struct adamw *by) {
    WALK(update_of(shard->parameter + from, shard->first + from, block, now, *by))
}

typedef uint16_t lanes __attribute__((vector_size(16)));
enum { LANES = 8, TILE = 128 };

INLINE lanes low_halves(lanes a, lanes b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
INLINE lanes high_halves(lanes a, lanes b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }

/* Transposes eight rows of eight: three perfect shuffles of all 64 elements. */
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

/* target[column][row] <- source[row][column] of two-byte elements, by tiles that fit a cache. */
INLINE void transpose(
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

VARIANTS(
    direction,
    (long num_rows, long num_columns, const float *gradient, long gradient_stride, float *momentum, long momentum_stride, char *out,
     long out_stride, int width, float coefficient, float weight, int rule, int nesterov, int commit),
    (num_rows, num_columns, gradient, gradient_stride, momentum, momentum_stride, out, out_stride, width, coefficient, weight, rule,
     nesterov, commit)
)
VARIANTS(
    apply,
    (long num_rows, long num_columns, float *parameter, long parameter_stride, const char *update, long update_stride, int width,
     float kept, float step_size),
    (num_rows, num_columns, parameter, parameter_stride, update, update_stride, width, kept, step_size)
)
VARIANTS(
    transpose, (long num_rows, long num_columns, const uint16_t *source, long source_stride, uint16_t *target, long target_stride),
    (num_rows, num_columns, source, source_stride, target, target_stride)
)
VARIANTS(adamw_moments, (struct position *at, long count, float *block, const struct adamw *by), (at, count, block, by))
VARIANTS(adamw_update, (struct position *at, long count, float *block, const struct adamw *by), (at, count, block, by))
#endif
