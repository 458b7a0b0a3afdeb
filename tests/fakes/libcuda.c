/* What artd asks of NVIDIA's driver, with the driver's signatures: FAKE_CUDA_INIT is what cuInit answers (-1: it crashes, -2: it hangs),
 * FAKE_CUDA_GPUS how many GPUs there are. As the real one does, it counts what CUDA_VISIBLE_DEVICES leaves, up to the first number that
 * is no GPU's, and does not initialise where nothing is left. */
#include <stdlib.h>
#include <unistd.h>

enum { SUCCESS, NOT_INITIALIZED = 3, STUB_LIBRARY = 34, NO_DEVICE = 100 };
static int started;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int left(void) {
    int gpus = number("FAKE_CUDA_GPUS", 1), count = 0;
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return gpus;
    for (char *end; ; text = end + 1, count++) {
        long device = strtol(text, &end, 10);
        if (end == text || device < 0 || device >= gpus) return count;
        if (*end != ',') return count + 1;
    }
}

int cuInit(unsigned flags) {
    int code = flags ? 1 : number("FAKE_CUDA_INIT", left() ? SUCCESS : NO_DEVICE);
    if (code == -1) abort();
    if (code == -2) pause();
    started = code == SUCCESS;
    return code;
}

int cuDeviceGetCount(int *count) {
    if (!started) return NOT_INITIALIZED;
    *count = left();
    return SUCCESS;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == NO_DEVICE ? "no CUDA-capable device is detected" : code == STUB_LIBRARY ? "CUDA driver is a stub library" : 0;
    return *text ? SUCCESS : 1;
}
