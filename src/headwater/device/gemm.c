/* Products of a few rows with a large weight, on a CPU: out = op(x * transposed(weight) + bias).
 *
 * A decode step reads every weight once for a few rows, so memory is the limit up to about
 * eight rows and arithmetic after that. Each panel of the weight is read from memory once,
 * used for all rows from the L2 cache, and the next panel is prefetched meanwhile.
 *
 *   packed weight   [panels][depth][WIDTH]; the last panel is padded with zeros
 *   tile            up to ROWS rows of x times one panel, summed in registers
 *
 * Plain C with vector types; all numbers are float32. The sum of an element is formed in the
 * same order for any number of rows and threads.
 */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8 /* 8 x 2 sums, two weights and one input fit into 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6 /* 6 x 2 sums: 16 registers */
#else
#define LANES 4
#define ROWS 8
#endif
#define VECTORS 2
#define WIDTH (VECTORS * LANES)
#define MANY 192 /* rows of x that stay in the caches while all panels pass */
#define DEPTH 1024 /* rows of a panel that stay in the L2 cache, with as many prefetched */

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));

enum { STORE, SILU, TIMES, PLUS };

typedef struct {
    const float *x, *packed, *bias, *other; /* bias may be null; other is only for TIMES, PLUS */
    float *out;
    int64_t rows, width, depth, op;
} Product;

int64_t panel_width(void) { return WIDTH; }

/* packed[p][k][i] = weight[p * WIDTH + i][k] */
void pack_panels(const float *weight, float *packed, int64_t width, int64_t depth) {
#pragma omp parallel for schedule(static)
    for (int64_t start = 0; start < width; start += WIDTH)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t i = 0; i < WIDTH; i++)
                packed[start * depth + k * WIDTH + i] =
                    start + i < width ? weight[(start + i) * depth + k] : 0.0f;
}

/* e^x for x <= 0, to a unit or two in the last place. */
INLINE float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    /* e^x = 2^whole * e^r. ln 2 is subtracted in two parts, so that r keeps its last bits. */
    float whole = (float)(int32_t)(x * 1.44269504f - 0.5f);
    float r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float number; } power = {((int32_t)whole + 127) << 23};
    return (p * r * r + r + 1.0f) * power.number;
}

INLINE float silu(float x) {
    float e = exp_of(x < 0.0f ? x : -x); /* never overflows */
    return x * (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* Bias and operation on `count` finished sums of a row, from `column` on. */
INLINE void finish(const Product *product, int64_t row, int64_t column, int64_t count) {
    float *out = product->out + row * product->width + column;
    if (product->bias)
        for (int64_t i = 0; i < count; i++) out[i] += product->bias[column + i];
    const float *other = product->other + row * product->width + column;
    if (product->op == SILU)
        for (int64_t i = 0; i < count; i++) out[i] = silu(out[i]);
    else if (product->op == TIMES)
        for (int64_t i = 0; i < count; i++) out[i] *= other[i];
    else if (product->op == PLUS)
        for (int64_t i = 0; i < count; i++) out[i] += other[i];
}

/* Add `rows` rows of x times `depth` rows of a panel to `sums`, a tile of the output or a copy
 * of one. `ahead` is prefetched in steps of `step` bytes. */
INLINE void tile(const float *x, int64_t stride, const float *panel, int64_t depth, float *sums,
                 int64_t sums_stride, int rows, int is_first, const char *ahead, int64_t step) {
    Vector sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = is_first ? (Vector){0.0f}
                                 : *(const Vector *)(sums + r * sums_stride + v * LANES);
    for (int64_t k = 0; k < depth; k++, panel += WIDTH, ahead += step) {
        Vector weight[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            weight[v] = *(const Vector *)(panel + v * LANES);
            __builtin_prefetch(ahead + v * sizeof(Vector), 0, 2);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * stride + k] * weight[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            *(Vector *)(sums + r * sums_stride + v * LANES) = sum[r][v];
}

/* `tile` with a constant number of rows in each case, so that the sums stay in registers. */
static void tile_of(const float *x, int64_t stride, const float *panel, int64_t depth,
                    float *sums, int64_t sums_stride, int rows, int is_first, const char *ahead,
                    int64_t step) {
#define CASE(n) \
    case n: tile(x, stride, panel, depth, sums, sums_stride, n, is_first, ahead, step); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 8
        CASE(7) CASE(8)
#endif
    }
}

/* Rows [begin, end) times one panel. */
static void panel_product(const Product *product, int64_t begin, int64_t end, int64_t column) {
    int64_t depth = product->depth, width = product->width;
    int64_t count = width - column < WIDTH ? width - column : WIDTH;
    int64_t tiles = (end - begin + ROWS - 1) / ROWS;
    for (int64_t k = 0; k < depth; k += DEPTH) {
        int64_t deep = depth - k < DEPTH ? depth - k : DEPTH;
        const float *panel = product->packed + column * depth + k * WIDTH;
        /* Each tile prefetches its share of what is read next. */
        const char *next = (const char *)(panel + deep * WIDTH);
        int64_t step = WIDTH * (int64_t)sizeof(float) / tiles;
        for (int64_t row = begin; row < end; row += ROWS, next += step * deep) {
            int some = end - row < ROWS ? (int)(end - row) : ROWS;
            const float *x = product->x + row * depth + k;
            float *out = product->out + row * width + column, edge[ROWS * WIDTH];
            if (count == WIDTH) {
                tile_of(x, depth, panel, deep, out, width, some, k == 0, next, step);
            } else {
                /* The panel is wider than the rest of the output: sum in a copy. */
                for (int r = 0; r < some; r++)
                    memcpy(edge + r * WIDTH, out + r * width, (size_t)count * sizeof(float));
                tile_of(x, depth, panel, deep, edge, WIDTH, some, k == 0, next, step);
                for (int r = 0; r < some; r++)
                    memcpy(out + r * width, edge + r * WIDTH, (size_t)count * sizeof(float));
            }
            if (k + deep == depth)
                for (int r = 0; r < some; r++) finish(product, row + r, column, count);
        }
    }
}

void multiply(const Product *product) {
    int64_t rows = product->rows;
#pragma omp parallel
    for (int64_t row = 0; row < rows; row += MANY) {
#pragma omp for schedule(static) nowait
        for (int64_t column = 0; column < product->width; column += WIDTH)
            panel_product(product, row, rows - row < MANY ? rows : row + MANY, column);
    }
}
