/* Stands in for libcuda.so.1: GPUs as FAKE_CUDA says, one letter each: c has a context, s is a slice (MIG), - neither. */
#include <stdlib.h>
#include <string.h>

static char *world(void) {
    static char state[16];
    if (!state[0] && getenv("FAKE_CUDA")) strncpy(state, getenv("FAKE_CUDA"), sizeof state - 1);
    return state;
}

int cuDeviceGetCount(int *count) { *count = (int)strlen(world()); return *count ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < (int)strlen(world()) ? 0 : 101; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = world()[device] == 'c';
    return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device) {
    memset(uuid, 0xab, 16);
    uuid[15] = (unsigned char)device;
    return 0;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    cuDeviceGetUuid(uuid, device);
    if (world()[device] == 's') uuid[0] = 0;
    return 0;
}

/* What cudaSetDevice does since CUDA 12. */
void fake_make_context(int device) { world()[device] = 'c'; }
