/* What artd's pulls call of the CUDA runtime, with the runtime's signatures and over plain memory. Copies are done at once on stream
 * `fake_stream`, and refused on any other. */
#include <stddef.h>
#include <string.h>

enum { SUCCESS, INVALID_VALUE = 1, INVALID_PITCH = 12, INVALID_DIRECTION = 21, DEFAULT_KIND = 4 };
void *fake_stream(void) { return (void *)0x7fedcba987654321; }

int cudaMemcpyAsync(void *to, const void *from, size_t count, int kind, void *stream) {
    if (kind != DEFAULT_KIND) return INVALID_DIRECTION;
    if (stream != fake_stream()) return INVALID_VALUE;
    memcpy(to, from, count);
    return SUCCESS;
}

int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
    if (kind != DEFAULT_KIND) return INVALID_DIRECTION;
    if (stream != fake_stream()) return INVALID_VALUE;
    if (width > to_pitch || width > from_pitch) return INVALID_PITCH;
    for (size_t row = 0; row < height; row++)
        memcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return SUCCESS;
}

int cudaGetLastError(void) { return SUCCESS; }
const char *cudaGetErrorString(int code) { return code == INVALID_PITCH ? "invalid pitch argument" : "invalid argument"; }
