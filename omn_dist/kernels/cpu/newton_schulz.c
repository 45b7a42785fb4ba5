/* Newton-Schulz in bf16 with fp32 sums, for CPUs with AVX512_BF16, with the results of torch's
 * products to the bit. Of a symmetric product it computes what lies below the diagonal, and copies
 * the rest. products.py compares both, shape by shape, before the first step.
 *
 * Columns of the right factor are packed in strips, by pairs of rows. A strip stays in a core's
 * cache while all rows of the left factor are multiplied with it, and a tile of the result stays in
 * registers for the whole depth.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 12)
#include <immintrin.h>
#define VECTOR __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE VECTOR static inline __attribute__((always_inline))

enum { LANES = 16, TILE_ROWS = 8, TILE_VECTORS = 3, STRIP = TILE_VECTORS * LANES };

/* A perfect shuffle of two vectors; four of them, of all rows, transpose 16 rows of 16. */
#define LOW_HALVES(A, B) __builtin_shufflevector(A, B, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define HIGH_HALVES(A, B) __builtin_shufflevector(A, B, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
enum { SHUFFLES = 4 };

typedef uint32_t lanes __attribute__((vector_size(4 * LANES)));

struct factor {
    const uint16_t *start;
    long stride;
};

INLINE __mmask16 first_lanes(long count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

/* strip[pair][column] <- rows 2 pair and 2 pair + 1 of the right factor. */
INLINE void pack_rows(uint32_t *strip, struct factor right, long num_pairs, long num_columns) {
    for (long pair = 0; pair < num_pairs; pair++) {
        const uint16_t *first = right.start + 2 * pair * right.stride, *second = first + right.stride;
        for (long column = 0; column < num_columns; column += LANES) {
            const __mmask16 mask = first_lanes(num_columns - column);
            const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, first + column));
            const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, second + column));
            _mm512_storeu_si512(strip + pair * STRIP + column, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

/* The same for a right factor that is stored transposed: the elements of a pair are neighbours. */
INLINE void pack_columns(uint32_t *strip, struct factor right, long num_pairs, long num_columns) {
    for (long left = 0; left < num_columns; left += LANES) {
        for (long top = 0; top < num_pairs; top += LANES) {
            const __mmask16 mask = first_lanes(num_pairs - top);
            lanes rows[LANES], shuffled[LANES];
            for (long row = 0; row < LANES; row++) {
                const uint16_t *source = right.start + (left + row) * right.stride + 2 * top;
                rows[row] = left + row < num_columns ? (lanes)_mm512_maskz_loadu_epi32(mask, source) : (lanes){0};
            }
            for (int shuffle = 0; shuffle < SHUFFLES; shuffle++) {
                for (int row = 0; row < LANES / 2; row++) {
                    shuffled[2 * row] = LOW_HALVES(rows[row], rows[row + LANES / 2]);
                    shuffled[2 * row + 1] = HIGH_HALVES(rows[row], rows[row + LANES / 2]);
                }
                memcpy(rows, shuffled, sizeof rows);
            }
            const long bottom = num_pairs - top < LANES ? num_pairs - top : LANES;
            for (long row = 0; row < bottom; row++) memcpy(strip + (top + row) * STRIP + left, &rows[row], sizeof(lanes));
        }
    }
}

struct result {
    uint16_t *out;
    long out_stride;
    const uint16_t *addend;
    long addend_stride;
    float alpha, beta;
};

/* A tile of the result: alpha times the sum over the depth, plus beta times the addend. The sum is
 * in order, in chunks that begin at zero. */
INLINE void tile(
    const int num_rows, const int num_vectors, long num_columns, long num_pairs, long pairs_a_chunk, struct factor left,
    const uint32_t *strip, const struct result *result, long row, long column
) {
    __m512 total[TILE_ROWS][TILE_VECTORS];
    const char *rows = (const char *)(left.start + row * left.stride);
    const long row_bytes = 2 * left.stride;
    for (long begin = 0; begin < num_pairs; begin += pairs_a_chunk) {
        const long end = num_pairs - begin < pairs_a_chunk ? num_pairs : begin + pairs_a_chunk;
        __m512 sum[TILE_ROWS][TILE_VECTORS];
        for (int i = 0; i < num_rows; i++)
            for (int j = 0; j < num_vectors; j++) sum[i][j] = _mm512_setzero_ps();
        for (long pair = begin; pair < end; pair++) {
            __m512bh of_strip[TILE_VECTORS];
            for (int j = 0; j < num_vectors; j++)
                of_strip[j] = (__m512bh)_mm512_loadu_si512(strip + pair * STRIP + j * LANES);
            for (int i = 0; i < num_rows; i++) {
                int32_t both;
                memcpy(&both, rows + i * row_bytes + 4 * pair, sizeof both);
                const __m512bh of_row = (__m512bh)_mm512_set1_epi32(both);
                for (int j = 0; j < num_vectors; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], of_row, of_strip[j]);
            }
        }
        for (int i = 0; i < num_rows; i++)
            for (int j = 0; j < num_vectors; j++) total[i][j] = begin ? _mm512_add_ps(total[i][j], sum[i][j]) : sum[i][j];
    }
    for (int i = 0; i < num_rows; i++) {
        for (int j = 0; j < num_vectors; j++) {
            const __mmask16 mask = first_lanes(num_columns - column - j * LANES);
            __m512 value = _mm512_mul_ps(total[i][j], _mm512_set1_ps(result->alpha));
            if (result->addend) {
                const uint16_t *addend = result->addend + (row + i) * result->addend_stride + column + j * LANES;
                const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, addend)), 16);
                value = _mm512_fmadd_ps(_mm512_set1_ps(result->beta), _mm512_castsi512_ps(bits), value);
            }
            uint16_t *out = result->out + (row + i) * result->out_stride + column + j * LANES;
            _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(value));
        }
    }
}

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* to <- from^T, 16 rows of 16. */
INLINE void transpose_block(uint16_t *to, const uint16_t *from, long stride) {
    halves rows[LANES], shuffled[LANES];
    for (int row = 0; row < LANES; row++) memcpy(&rows[row], from + row * stride, sizeof(halves));
    for (int shuffle = 0; shuffle < SHUFFLES; shuffle++) {
        for (int row = 0; row < LANES / 2; row++) {
            shuffled[2 * row] = LOW_HALVES(rows[row], rows[row + LANES / 2]);
            shuffled[2 * row + 1] = HIGH_HALVES(rows[row], rows[row + LANES / 2]);
        }
        memcpy(rows, shuffled, sizeof rows);
    }
    for (int row = 0; row < LANES; row++) memcpy(to + row * stride, &rows[row], sizeof(halves));
}

/* Copies what lies below the diagonal to above it. */
VECTOR static void mirror(uint16_t *out, long stride, long size) {
    const long whole = size / LANES * LANES;
    for (long row = 0; row < whole; row += LANES)
        for (long column = 0; column <= row; column += LANES)
            transpose_block(out + column * stride + row, out + row * stride + column, stride);
    for (long row = whole; row < size; row++)
        for (long column = 0; column < row; column++) out[column * stride + row] = out[row * stride + column];
}

/* A product of bf16 matrices, out <- alpha left right + beta addend. */
struct product {
    long num_rows, num_columns, depth;
    struct factor left, right;
    int right_transposed; /* The right factor is stored as [columns, depth]. */
    int symmetric;        /* The result is known to be symmetric. */
    long chunk;           /* How much of the depth is summed before it is added to the rest. */
    struct result result;
};

/* `out` may be the addend and the right factor, since a strip is packed before its columns are
 * written; it must not be the left factor. */
VECTOR static void multiply(const struct product *of, uint32_t *strip) {
    const long num_pairs = of->depth / 2, pairs_a_chunk = of->chunk / 2;
    for (long column = 0; column < of->num_columns; column += STRIP) {
        const long width = of->num_columns - column < STRIP ? of->num_columns - column : STRIP;
        const struct factor part = {of->right.start + column * (of->right_transposed ? of->right.stride : 1), of->right.stride};
        if (of->right_transposed) pack_columns(strip, part, num_pairs, width);
        else pack_rows(strip, part, num_pairs, width);
        long row = of->symmetric ? column / TILE_ROWS * TILE_ROWS : 0;
#define TILE(ROWS, VECTORS) \
    tile(ROWS, VECTORS, of->num_columns, num_pairs, pairs_a_chunk, of->left, strip, &of->result, row, column)
#define ALL_ROWS(VECTORS)                                                               \
    for (; row + TILE_ROWS <= of->num_rows; row += TILE_ROWS) TILE(TILE_ROWS, VECTORS); \
    for (; row < of->num_rows; row++) TILE(1, VECTORS);
        if (width > 2 * LANES) { ALL_ROWS(3) }
        else if (width > LANES) { ALL_ROWS(2) }
        else { ALL_ROWS(1) }
    }
    if (of->symmetric) mirror(of->result.out, of->result.out_stride, of->num_columns);
}

/* All steps X <- a X + (b A + c A A) X with A = X X^T. The first step reads `start`, the last one
 * writes `end`, those between work in place on `iterate`. All three are contiguous [size, length],
 * of even size and length, and may be one. A step whose c is zero computes no square.
 *
 * `coefficients` has a, b, c of each step; `chunks` those of the first A, of each other A, of A A
 * and of the last product. Working memory: `gram` and `polynomial` [size, size], `strip` 24 times
 * the larger of size and length.
 */
VECTOR void omn_newton_schulz(
    long size, long length, long num_steps, const float *coefficients, const long *chunks, const uint16_t *start, uint16_t *iterate,
    uint16_t *end, uint16_t *gram, uint16_t *polynomial, uint32_t *strip
) {
    const uint16_t *from = start;
    for (long step = 0; step < num_steps; step++, coefficients += 3) {
        const float a = coefficients[0], b = coefficients[1], c = coefficients[2];
        uint16_t *to = step == num_steps - 1 ? end : iterate;
        const struct factor x = {from, length}, square = {gram, size}, factor = {c != 0 ? polynomial : gram, size};
        const struct product first = {
            size, size, length, x, x, 1, 1, chunks[step ? 1 : 0], {gram, size, NULL, 0, 1, 0},
        };
        multiply(&first, strip);
        if (c != 0) {
            const struct product second = {size, size, size, square, square, 0, 1, chunks[2], {polynomial, size, gram, size, c, b}};
            multiply(&second, strip);
        }
        const struct product third = {size, length, size, factor, x, 0, 0, chunks[3], {to, length, from, length, c != 0 ? 1 : b, a}};
        multiply(&third, strip);
        from = to;
    }
}

/* One product of contiguous matrices, to find torch's order of sums: of left and right, which is
 * [depth, columns], or with `symmetric` of left and its transpose. `addend` may be null. */
VECTOR void omn_product(
    long num_rows, long num_columns, long depth, const uint16_t *left, const uint16_t *right, int symmetric, long chunk,
    uint16_t *out, const uint16_t *addend, float alpha, float beta, uint32_t *strip
) {
    const struct product of = {
        num_rows, num_columns, depth, {left, depth}, {right, symmetric ? depth : num_columns}, symmetric, symmetric, chunk,
        {out, num_columns, addend, num_columns, alpha, beta},
    };
    multiply(&of, strip);
}

#endif
