/* Attention of prompt chunks over the blocks of the KV pool, in place, on a CPU.
 *
 * Scores are computed transposed: a panel of queries lies side by side in vectors, and keys
 * and values are read one number at a time. So the pool needs no reordering, a softmax works on
 * whole vectors, and all heads of a KV head share what is read.
 *
 *   pool     [blocks][layers][2][block_tokens][kv_heads][dim]
 *   lane     one query of one head; lane = token * group + head of the group
 *   panel    WIDTH lanes: scaled queries [dim][WIDTH], and sums of values [dim][WIDTH]
 *
 * Keys are taken in pieces of a block. Each piece corrects the sums of the pieces before for a
 * new largest score, so scores are never stored for a whole context.
 *
 * Plain C with vector types; all numbers are float32. A query's result does not depend on the
 * other rows of the step, nor on the number of threads.
 */

#include <math.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8 /* 8 x 2 sums in 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define ROWS 6 /* 6 x 2 sums in 16 registers */
#else
#define LANES 4
#define ROWS 6
#endif
#define REST 2 /* rows of the tiles for what is left; a head's size is a multiple of it */
#define VECTORS 2
#define WIDTH (VECTORS * LANES)
#define KEYS 32    /* keys of a piece, whose scores stay in the L1 cache */
#define PANELS 6   /* panels for which a piece is read once */
#define WIDEST 256 /* numbers in a head, at most */

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4)));

typedef struct {
    const float *query; /* [tokens][kv_heads][group][dim], a token `query_stride` apart */
    const float *pool;
    float *out; /* [tokens][kv_heads][group][dim] */
    const int64_t *starts, *counts, *firsts; /* of each row: first token, tokens, its position */
    const int64_t *tables, *slots; /* of each row: where its slots begin; all slots */
    const int64_t *items; /* [num_items][2]: a row, and the first of its lanes */
    int64_t num_items, query_stride;
    int64_t layer, layers, block_tokens, kv_heads, group, dim;
    float scaling;
} Chunks;

typedef struct {
    float query[WIDEST * WIDTH], sum[WIDEST * WIDTH];
    Vector most[VECTORS], total[VECTORS];
    Ints last[VECTORS]; /* position of each lane's query: the last key that it sees */
    int32_t first_last, last_last;
    int vectors; /* of the lanes that are used: a last panel may have few */
} Panel;

int64_t item_lanes(void) { return PANELS * WIDTH; }

int64_t widest_head(void) { return WIDEST; }

int64_t head_step(void) { return REST; }

INLINE Vector larger(Vector a, Vector b) {
    Ints which = a > b;
    return (Vector)(((Ints)a & which) | ((Ints)b & ~which));
}

/* 2^x for x <= 0, to a unit or two in the last place; 0 from -127 on. */
INLINE Vector power_of_two(Vector x) {
    x = larger(x, (Vector){0.0f} - 127.0f);
    Ints whole = __builtin_convertvector(x - 0.5f, Ints);
    Vector r = x - __builtin_convertvector(whole, Vector);
    Vector p = r * 1.54697320e-4f + 1.34004322e-3f;
    p = p * r + 9.61802560e-3f;
    p = p * r + 5.55032721e-2f;
    p = p * r + 2.40226512e-1f;
    p = p * r + 6.93147207e-1f;
    p = p * r + 1.0f;
    return p * (Vector)((whole + 127) << 23);
}

/* sums[r] = sums[r] * factor + sum over k of x[r * row + k * step] * panel[k], for `rows` rows;
 * without a factor the sums begin at zero. */
INLINE void tile(const float *x, int64_t row, int64_t step, const float *panel, int64_t depth,
                 float *sums, const Vector *factor, int rows, int vectors) {
    Vector sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = factor ? *(const Vector *)(sums + r * WIDTH + v * LANES) * factor[v]
                               : (Vector){0.0f};
    for (int64_t k = 0; k < depth; k++, x += step, panel += WIDTH)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sum[r][v] += x[r * row] * *(const Vector *)(panel + v * LANES);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            *(Vector *)(sums + r * WIDTH + v * LANES) = sum[r][v];
}

/* Take `count` keys and values, a token `stride` apart, into a panel. The first key has position
 * `at`. */
INLINE void take_by(Panel *panel, const float *keys, const float *values, int64_t stride,
                    int32_t at, int64_t count, int64_t dim, int vectors) {
    float scores[KEYS * WIDTH];
    int64_t k = 0;
    for (; k + ROWS <= count; k += ROWS)
        tile(keys + k * stride, stride, 1, panel->query, dim, scores + k * WIDTH, 0, ROWS, vectors);
    for (; k + REST <= count; k += REST)
        tile(keys + k * stride, stride, 1, panel->query, dim, scores + k * WIDTH, 0, REST, vectors);
    for (; k < count; k++)
        tile(keys + k * stride, stride, 1, panel->query, dim, scores + k * WIDTH, 0, 1, vectors);
    Vector factor[VECTORS];
    for (int v = 0; v < vectors; v++) {
        Vector most = panel->most[v];
        for (k = 0; k < count; k++) {
            Vector *score = (Vector *)(scores + k * WIDTH + v * LANES);
            int32_t position = at + (int32_t)k;
            if (position > panel->first_last) {
                Ints hidden = panel->last[v] < position;
                Vector low = (Vector){0.0f} - INFINITY;
                *score = (Vector)(((Ints)*score & ~hidden) | ((Ints)low & hidden));
            }
            most = larger(*score, most);
        }
        factor[v] = power_of_two(panel->most[v] - most);
        Vector total = panel->total[v] * factor[v];
        for (k = 0; k < count; k++) {
            Vector *score = (Vector *)(scores + k * WIDTH + v * LANES);
            *score = power_of_two(*score - most);
            total += *score;
        }
        panel->most[v] = most;
        panel->total[v] = total;
    }
    int64_t d = 0;
    for (; d + ROWS <= dim; d += ROWS)
        tile(values + d, 1, stride, scores, count, panel->sum + d * WIDTH, factor, ROWS, vectors);
    for (; d < dim; d += REST)
        tile(values + d, 1, stride, scores, count, panel->sum + d * WIDTH, factor, REST, vectors);
}

/* `take_by` with a constant number of vectors, and apart from its caller, so that sums stay in
 * registers. */
static __attribute__((noinline)) void take(Panel *panel, const float *keys, const float *values, int64_t stride,
                 int32_t at, int64_t count, int64_t dim) {
    if (panel->vectors == 1) take_by(panel, keys, values, stride, at, count, dim, 1);
    else take_by(panel, keys, values, stride, at, count, dim, VECTORS);
}

/* Make a panel of lanes [lane, lane + WIDTH) of a row; lanes from `end` on repeat the last. */
static void load(Panel *panel, const Chunks *chunks, int64_t row, int64_t head, int64_t lane,
                 int64_t end) {
    int64_t dim = chunks->dim, group = chunks->group;
    float by = chunks->scaling * 1.44269504f; /* for powers of two instead of e */
    for (int64_t i = 0; i < WIDTH; i++) {
        int64_t own = lane + i < end ? lane + i : end - 1, token = own / group;
        const float *query = chunks->query + (chunks->starts[row] + token) * chunks->query_stride +
                             (head * group + own % group) * dim;
        for (int64_t d = 0; d < dim; d++) panel->query[d * WIDTH + i] = query[d] * by;
        panel->last[i / LANES][i % LANES] = (int32_t)(chunks->firsts[row] + token);
    }
    panel->vectors = end - lane <= LANES ? 1 : VECTORS;
    panel->first_last = panel->last[0][0];
    panel->last_last = panel->last[VECTORS - 1][LANES - 1];
    for (int64_t d = 0; d < dim * WIDTH; d++) panel->sum[d] = 0.0f;
    for (int v = 0; v < VECTORS; v++) {
        panel->most[v] = (Vector){0.0f} - INFINITY;
        panel->total[v] = (Vector){0.0f};
    }
}

static void store(const Panel *panel, const Chunks *chunks, int64_t row, int64_t head,
                  int64_t lane, int64_t end) {
    int64_t dim = chunks->dim, group = chunks->group;
    for (int64_t i = 0; i < WIDTH && lane + i < end; i++) {
        int64_t token = chunks->starts[row] + (lane + i) / group;
        int64_t query = (token * chunks->kv_heads + head) * group + (lane + i) % group;
        float *out = chunks->out + query * dim;
        float by = 1.0f / panel->total[i / LANES][i % LANES];
        for (int64_t d = 0; d < dim; d++) out[d] = panel->sum[d * WIDTH + i] * by;
    }
}

/* The keys at a position of a row, and how many of them are one piece. */
INLINE const float *piece(const Chunks *chunks, int64_t row, int64_t head, int64_t at,
                          int64_t *count) {
    int64_t block_tokens = chunks->block_tokens, inside = at % block_tokens;
    int64_t slot = chunks->slots[chunks->tables[row] + at / block_tokens];
    int64_t token = (slot * chunks->layers + chunks->layer) * 2 * block_tokens + inside;
    *count = block_tokens - inside < KEYS ? block_tokens - inside : KEYS;
    return chunks->pool + (token * chunks->kv_heads + head) * chunks->dim;
}

/* The processor does not foresee reads of one head's part of each token. */
INLINE void prefetch(const float *numbers, int64_t stride, int64_t count, int64_t dim) {
    for (int64_t k = 0; k < count; k++, numbers += stride)
        for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(numbers + d, 0, 2);
}

/* Up to PANELS panels of one row and KV head. */
static void attend_item(const Chunks *chunks, int64_t row, int64_t head, int64_t lane) {
    Panel panels[PANELS];
    int64_t end = chunks->counts[row] * chunks->group, num_panels = 0;
    for (; num_panels < PANELS && lane + num_panels * WIDTH < end; num_panels++)
        load(&panels[num_panels], chunks, row, head, lane + num_panels * WIDTH, end);
    int64_t dim = chunks->dim, stride = chunks->kv_heads * dim;
    int64_t plane = chunks->block_tokens * stride;
    int64_t seen = panels[num_panels - 1].last_last + 1, count, next_count = 0;
    const float *keys = piece(chunks, row, head, 0, &count), *next = keys;
    for (int64_t at = 0; at < seen; at += count, keys = next, count = next_count) {
        if (at + count < seen) {
            next = piece(chunks, row, head, at + count, &next_count);
            prefetch(next, stride, next_count, dim);
            prefetch(next + plane, stride, next_count, dim);
        }
        for (int64_t p = 0; p < num_panels; p++) {
            int64_t left = panels[p].last_last + 1 - at;
            if (left > 0)
                take(&panels[p], keys, keys + plane, stride, (int32_t)at,
                     left < count ? left : count, dim);
        }
    }
    for (int64_t p = 0; p < num_panels; p++)
        store(&panels[p], chunks, row, head, lane + p * WIDTH, end);
}

/* All items: every row, in parts of PANELS panels, for each KV head. */
void attend_chunks(const Chunks *chunks) {
    int64_t all = chunks->num_items * chunks->kv_heads;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < all; i++) {
        const int64_t *item = chunks->items + i % chunks->num_items * 2;
        attend_item(chunks, item[0], i / chunks->num_items, item[1]);
    }
}
