/* What a step does between its matrix products, on one thread of a CPU.
 *
 * With a small batch each operation has a few thousand numbers, so most of the time would go to
 * calling one operation after another, while weights stream through the core's caches. Plain C,
 * which the compiler vectorises; all numbers are float32.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* out[r] = x[r] / sqrt(mean(x[r]^2) + epsilon) * weight */
void rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t width,
              float epsilon) {
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        float sum = 0.0f;
        for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
        float by = 1.0f / sqrtf(sum / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * by * weight[i];
    }
}

/* Rotate the halves of each token's first `heads` heads by its position, in place. */
void rotate(float *tokens, const float *cos, const float *sin, int64_t count, int64_t stride,
            int64_t heads, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t t = 0; t < count; t++, tokens += stride, cos += dim, sin += dim)
        for (int64_t h = 0; h < heads; h++) {
            float *low = tokens + h * dim, *high = low + half;
            for (int64_t i = 0; i < half; i++) {
                float a = low[i], b = high[i];
                low[i] = a * cos[i] - b * sin[i];
                high[i] = b * cos[half + i] + a * sin[half + i];
            }
        }
}

/* Copy `pieces` pieces of each of these tokens to rows of `target`, all `width` wide. */
void scatter(const float *source, const int64_t *tokens, const int64_t *rows, float *target,
             int64_t count, int64_t stride, int64_t pieces, int64_t width) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t p = 0; p < pieces; p++)
            memcpy(target + rows[t * pieces + p] * width,
                   source + tokens[t] * stride + p * width, (size_t)width * sizeof(float));
}

#define WIDEST 256 /* numbers in a head, at most */

typedef struct {
    const int64_t *lengths; /* [buffers]: tokens of each buffer that are seen */
    int64_t buffers, kv_heads, queries;
    int64_t stride; /* from one buffer's head to the next, in its keys or values */
    int64_t width;  /* from one query's scores to the next */
    int64_t span;   /* scores of a query; those that its buffer does not reach are -infinity */
} OwnTokens;

#define INLINE static inline __attribute__((always_inline))

/* e^x for x <= 0, to a unit or two in the last place. */
INLINE float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float whole = floorf(x * 1.44269504f + 0.5f);
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

/* Sixteen at a time, side by side: the compiler may not reorder comparisons itself. */
INLINE float largest(const float *x, int64_t count, float most) {
    float side[16];
    int64_t i = 0;
    for (int j = 0; j < 16; j++) side[j] = most;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++) side[j] = x[i + j] > side[j] ? x[i + j] : side[j];
    for (; i < count; i++) most = x[i] > most ? x[i] : most;
    for (int j = 0; j < 16; j++) most = side[j] > most ? side[j] : most;
    return most;
}

INLINE float exp_all(float *x, int64_t count, float most) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        x[i] = exp_of(x[i] - most);
        sum += x[i];
    }
    return sum;
}

INLINE void score(const OwnTokens *buffers, const float *query, const float *keys, float *scores,
                  int64_t dim) {
    for (int64_t head = 0; head < buffers->buffers * buffers->kv_heads; head++, keys += buffers->stride) {
        int64_t length = buffers->lengths[head / buffers->kv_heads];
        for (int64_t g = 0; g < buffers->queries; g++, query += dim, scores += buffers->width) {
            for (int64_t t = 0; t < length; t++) {
                float sum = 0.0f;
                for (int64_t i = 0; i < dim; i++) sum += query[i] * keys[t * dim + i];
                scores[t] = sum;
            }
            for (int64_t t = length; t < buffers->span; t++) scores[t] = -INFINITY;
        }
    }
}

INLINE void weigh(const OwnTokens *buffers, const float *weights, const float *values, float *out,
                  int64_t dim) {
    for (int64_t head = 0; head < buffers->buffers * buffers->kv_heads;
         head++, values += buffers->stride) {
        int64_t length = buffers->lengths[head / buffers->kv_heads];
        for (int64_t g = 0; g < buffers->queries; g++, out += dim, weights += buffers->width) {
            float total[WIDEST] = {0.0f};
            for (int64_t t = 0; t < length; t++)
                for (int64_t i = 0; i < dim; i++) total[i] += weights[t] * values[t * dim + i];
            for (int64_t i = 0; i < dim; i++) out[i] = total[i];
        }
    }
}

/* Scores of each query over the keys of its buffer. The usual sizes are compiled apart. */
void own_scores(const OwnTokens *buffers, const float *query, const float *keys, float *scores,
                 int64_t dim) {
    if (dim == 64) score(buffers, query, keys, scores, 64);
    else if (dim == 128) score(buffers, query, keys, scores, 128);
    else score(buffers, query, keys, scores, dim);
}

/* Softmax, in place, over a query's scores of the shared tokens, [kv_heads][buffers][queries],
 * and of its buffer's own, [buffers][kv_heads][queries], together. */
void join_softmax(const OwnTokens *buffers, float *of_shared, float *own, int64_t shared) {
    for (int64_t head = 0; head < buffers->buffers * buffers->kv_heads; head++) {
        int64_t buffer = head / buffers->kv_heads, length = buffers->lengths[buffer];
        int64_t by_head = head % buffers->kv_heads * buffers->buffers + buffer;
        for (int64_t g = 0; g < buffers->queries; g++, own += buffers->width) {
            float *first = of_shared + (by_head * buffers->queries + g) * shared;
            float most = largest(own, length, largest(first, shared, -INFINITY));
            float by = 1.0f / (exp_all(first, shared, most) + exp_all(own, length, most));
            for (int64_t t = 0; t < shared; t++) first[t] *= by;
            for (int64_t t = 0; t < length; t++) own[t] *= by;
            for (int64_t t = length; t < buffers->span; t++) own[t] = 0.0f;
        }
    }
}

/* Softmax, in place, of [heads][queries][keys]: the first query sees `seen` keys, the next one
 * more. */
void causal_softmax(float *scores, int64_t heads, int64_t queries, int64_t keys, int64_t seen) {
    for (int64_t h = 0; h < heads; h++)
        for (int64_t q = 0; q < queries; q++, scores += keys) {
            float by = 1.0f / exp_all(scores, seen + q, largest(scores, seen + q, -INFINITY));
            for (int64_t t = 0; t < seen + q; t++) scores[t] *= by;
            for (int64_t t = seen + q; t < keys; t++) scores[t] = 0.0f;
        }
}

/* The values of each buffer, summed by weight. */
void own_values(const OwnTokens *buffers, const float *weights, const float *values, float *out,
                 int64_t dim) {
    if (dim == 64) weigh(buffers, weights, values, out, 64);
    else if (dim == 128) weigh(buffers, weights, values, out, 128);
    else weigh(buffers, weights, values, out, dim);
}
