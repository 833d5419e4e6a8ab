/* Fake for libcuda.so.1. FAKE_CUDA has a letter for each GPU: c has a context, s is a MIG instance, - neither.
   Memory pools are numbers: 0 to 15 the devices' default ones, the others a library's own. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define POOLS 32
#define POINTERS 0x700000000000u

static struct { uint64_t reserved, used, pending; } pools[POOLS];
static __thread int depth;
static int retained, pushed, synchronized;

static char *world(void) {
    static char state[16];
    if (!state[0] && getenv("FAKE_CUDA")) strncpy(state, getenv("FAKE_CUDA"), sizeof state - 1);
    return state;
}

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
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

/* Effect of cudaSetDevice since CUDA 12. */
void fake_make_context(int device) { world()[device] = 'c'; }

/* Effect of any call of the runtime in a thread without a current device. */
void fake_runtime_call(void) { if (!depth) fake_make_context(0); }

/* As in the driver, these create a context if there is none. */
int cuDevicePrimaryCtxRetain(void **context, int device) {
    fake_make_context(device);
    *context = (void *)(uintptr_t)(device + 1);
    retained++;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; retained--; return 0; }
int cuCtxPushCurrent_v2(void *context) { (void)context; depth++, pushed++; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = 0; depth--, pushed--; return 0; }
int fake_synchronized(void) { return synchronized; }
int fake_retained(void) { return retained + pushed; }

/* The calling thread has a current device. */
void fake_choose(void) { depth++; }

int cuCtxSynchronize(void) {
    if (!depth) return 201;
    synchronized++;
    for (int i = 0; i < POOLS; i++) pools[i].pending = 0;
    return 0;
}

/* Waits while the file FAKE_CUDA_SUSPENDED exists, as a suspended process does in the driver. */
int cuMemGetInfo_v2(size_t *left, size_t *total) {
    while (getenv("FAKE_CUDA_SUSPENDED") && !access(getenv("FAKE_CUDA_SUSPENDED"), F_OK)) usleep(1000);
    *left = *total = 0;
    return depth ? 0 : 201;
}

/* Locked while the file FAKE_CUDA_LOCKED exists. */
int cuCheckpointProcessGetState(int pid, int *state) {
    *state = getenv("FAKE_CUDA_LOCKED") && !access(getenv("FAKE_CUDA_LOCKED"), F_OK);
    return pid == getpid() ? 0 : 1;
}

int cuDeviceGetDefaultMemPool(void **pool, int device) { *pool = &pools[device]; return 0; }

/* As the driver does: in the mode in which a thread begins, an unsafe call ends the captures of all threads. */
static __thread int mode;
static int spoiled;
int fake_spoiled(void) { return spoiled; }
int cuThreadExchangeStreamCaptureMode(int *other) { int before = mode; mode = *other; *other = before; return 0; }

int cuMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
    spoiled += mode != 2;
    int i = (int)(((char *)pool - (char *)pools) / sizeof pools[0]);
    if (attribute != 5 && attribute != 7) return 1;
    *value = attribute == 5 ? pools[i].reserved : pools[i].used + pools[i].pending;
    return 0;
}

/* Freed memory stays until the device is synchronized. */
int cuMemPoolTrimTo(void *pool, size_t least) {
    spoiled += mode != 2;
    int i = (int)(((char *)pool - (char *)pools) / sizeof pools[0]);
    uint64_t outstanding = pools[i].used + pools[i].pending;
    pools[i].reserved = outstanding > least ? outstanding : least;
    return 0;
}

static uint64_t unmapped;
void fake_unmap(uint64_t pointer) { unmapped = pointer; }

int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    if (pointer < POINTERS) return 1;
    if (attribute == 13) *(int *)value = pointer != unmapped;
    else if (attribute == 17) *(void **)value = &pools[pointer - POINTERS];
    else return 1;
    return 0;
}

void fake_pool(int i, uint64_t reserved, uint64_t used, uint64_t pending) {
    pools[i].reserved = reserved;
    pools[i].used = used;
    pools[i].pending = pending;
}

uint64_t fake_pool_handle(int i) { return (uint64_t)(uintptr_t)&pools[i]; }

/* Allocates bytes from a pool, which the pointer encodes. */
uint64_t fake_allocate(int i, uint64_t bytes) {
    fake_runtime_call();
    pools[i].used += bytes;
    uint64_t outstanding = pools[i].used + pools[i].pending;
    if (outstanding > pools[i].reserved) pools[i].reserved = outstanding;
    return POINTERS + (uint64_t)i;
}

void fake_free(uint64_t pointer, uint64_t bytes) {
    fake_runtime_call();
    pools[pointer - POINTERS].used -= bytes;
    pools[pointer - POINTERS].pending += bytes;
}
