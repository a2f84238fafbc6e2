/* Chained SHA-256 keys of blocks: key[i] = SHA256(key[i-1] || tokens of block i).
 *
 * The hash functions are OpenSSL's, passed in as pointers, so neither OpenSSL's headers nor its
 * development package is needed. They use the processor's SHA instructions where it has them.
 * The caller does not hold Python's interpreter lock while this runs.
 */

#include <stdint.h>
#include <string.h>

typedef int (*init_fn)(void *);
typedef int (*update_fn)(void *, const void *, size_t);
typedef int (*final_fn)(unsigned char *, void *);

enum { KEY_BYTES = 32, CONTEXT_BYTES = 256 }; /* OpenSSL's context has 112 bytes */

/* Returns the number of keys written to `keys`: `count`, or fewer when OpenSSL reports an error. */
int64_t chain_keys(init_fn init, update_fn update, final_fn final, const unsigned char *parent,
                   const unsigned char *tokens, int64_t count, int64_t stride,
                   unsigned char *keys)
{
    _Alignas(16) unsigned char context[CONTEXT_BYTES];
    const unsigned char *previous = parent;
    for (int64_t i = 0; i < count; i++) {
        unsigned char *key = keys + i * KEY_BYTES;
        if (!init(context) || !update(context, previous, KEY_BYTES) ||
            !update(context, tokens + i * stride, (size_t)stride) || !final(key, context))
            return i;
        previous = key;
    }
    return count;
}
