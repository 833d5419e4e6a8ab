/* A libnvidia-ml.so.1 without a device: the functions that a memory monitor calls, answered from a file (world.h).
   It trusts NVML's protocols (versions, sizes, handles), so that the real bindings run on it unmodified. */
#include "calls.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { Bytes total, free, used; } Memory;
typedef struct { unsigned version; Bytes total, reserved, free, used; } MemoryV2;
typedef struct { char bus_id_legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; } PciInfo;
typedef struct { const char *cgroup; Bytes soft, hard, used; } Limits; /* nvmlGetMemoryLimits_v1_t */
typedef struct { void *device; Bytes type, data; unsigned gpu_instance, compute_instance; } EventData;

int references;

static int put_text(char *out, unsigned length, const char *text)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static void *handle_of(const Device *device)
{
    return (void *)(uintptr_t)device->handle;
}

static int start(const char *function)
{
    int failure = begin(function, "");
    if (!failure && !world())
        failure = DRIVER_NOT_LOADED;
    if (!failure)
        references++;
    return failure;
}

int nvmlInit(void) { return start(__func__); }
int nvmlInit_v2(void) { return start(__func__); }
int nvmlInitWithFlags(unsigned flags) { return start(__func__); }

int nvmlShutdown(void)
{
    BEGIN;
    references--;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    static const char *const names[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires restart", "Operating System Blocked Call",
        "RM has detected an NVML/RM version mismatch.", "In Use", "Insufficient Memory", "No Data",
        "vGPU ECC Not Supported", "Insufficient Resources", "Frequency Not Supported", "Argument Version Mismatch",
        "Deprecated", "Not Ready"};
    return code >= 0 && code < (int)(sizeof names / sizeof *names) ? names[code] : "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *out, unsigned length)
{
    BEGIN;
    return put_text(out, length, world()->driver_version);
}

int nvmlSystemGetNVMLVersion(char *out, unsigned length)
{
    int failure = begin(__func__, ""); /* answers before nvmlInit, too */
    return failure ? failure : put_text(out, length, world() ? world()->nvml_version : "");
}

int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    BEGIN;
    *out = world()->cuda_version;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

/* The nth device (parent < 0) or the nth instance of a device; NULL if there are fewer. */
static Device *nth(unsigned n, int parent)
{
    World *w = world();
    for (size_t i = 0; i < w->device_count; i++)
        if ((parent < 0 ? w->devices[i].parent < 0 : w->devices[i].parent == parent) && n-- == 0)
            return &w->devices[i];
    return NULL;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    BEGIN;
    for (*count = 0; nth(*count, -1);)
        ++*count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    Device *device = references ? nth(index, -1) : NULL;
    int failure = begin(__func__, device ? device->uuid : "");
    if (failure || !references)
        return failure ? failure : UNINITIALIZED;
    device = nth(index, -1);
    if (!device)
        return INVALID_ARGUMENT;
    *handle = handle_of(device);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    int failure = begin(__func__, uuid);
    if (failure || !references)
        return failure ? failure : UNINITIALIZED;
    World *w = world();
    for (size_t i = 0; i < w->device_count; i++)
        if (!strcmp(w->devices[i].uuid, uuid)) {
            *handle = handle_of(&w->devices[i]);
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *handle, char *out, unsigned length)
{
    BEGIN_DEVICE;
    return put_text(out, length, device->name);
}

int nvmlDeviceGetUUID(void *handle, char *out, unsigned length)
{
    BEGIN_DEVICE;
    return put_text(out, length, device->uuid);
}

int nvmlDeviceGetIndex(void *handle, unsigned *out)
{
    BEGIN_DEVICE;
    if (device->parent >= 0)
        return NOT_SUPPORTED;
    for (*out = 0; nth(*out, -1) != device;)
        ++*out;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *handle, PciInfo *out)
{
    BEGIN_DEVICE;
    memset(out, 0, sizeof *out);
    if (!*device->pci_bus_id)
        return NOT_SUPPORTED;
    snprintf(out->bus_id, sizeof out->bus_id, "%.31s", device->pci_bus_id);
    sscanf(device->pci_bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04x:%02x:%02x.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *out)
{
    BEGIN_DEVICE;
    NEED(total);
    const Bytes *number = device->number;
    *out = (Memory){number[N_total], number[N_free], number[N_used] + number[N_reserved]};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *out)
{
    BEGIN_DEVICE;
    NEED(total);
    if (out->version != (sizeof *out | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    const Bytes *number = device->number;
    *out = (MemoryV2){out->version, number[N_total], number[N_reserved], number[N_free], number[N_used]};
    if (device->known[N_partition_total]) {
        Bytes total = number[N_partition_total], used = number[N_partition_used];
        *out = (MemoryV2){out->version, total, 0, total - used, used};
    }
    return SUCCESS;
}

/* The limits of cgroups are lines "uuid cgroup soft hard used" of the file FAKENVML_FILE.limits, of which the last one
   counts; a cgroup without one has those of the nearest cgroup above. Without the file, the driver is older than 615. */
static FILE *limits_file(const char *mode)
{
    char path[4096];
    snprintf(path, sizeof path, "%s.limits", getenv("FAKENVML_FILE"));
    return access(path, F_OK) ? NULL : fopen(path, mode);
}

static bool find_limits(const Device *device, const char *cgroup, Limits *out)
{
    FILE *file = limits_file("re");
    char uuid[TEXT], path[1024];
    Limits each;
    bool found = false;
    while (file && fscanf(file, "%95s %1023s %llu %llu %llu", uuid, path, &each.soft, &each.hard, &each.used) == 5)
        if (!strcmp(uuid, device->uuid) && !strcmp(path, cgroup)) {
            *out = (Limits){out->cgroup, each.soft, each.hard, each.used};
            found = true;
        }
    if (file)
        fclose(file);
    return found;
}

int nvmlDeviceGetMemoryLimits_v1(void *handle, Limits *limits)
{
    BEGIN_DEVICE;
    FILE *file = limits_file("re");
    if (!file)
        return FUNCTION_NOT_FOUND;
    fclose(file);
    if (device->parent >= 0)
        return NOT_SUPPORTED;
    char path[1024];
    snprintf(path, sizeof path, "%s", limits->cgroup);
    while (!find_limits(device, path, limits)) {
        char *end = strrchr(path, '/');
        if (!end || end == path)
            return NOT_SUPPORTED;
        *end = 0;
    }
    return SUCCESS;
}

int nvmlDeviceSetMemoryLimits_v1(void *handle, const Limits *limits)
{
    BEGIN_DEVICE;
    FILE *file = limits_file("ae");
    if (!file)
        return FUNCTION_NOT_FOUND;
    Limits before = {0};
    find_limits(device, limits->cgroup, &before);
    fprintf(file, "%s %s %llu %llu %llu\n", device->uuid, limits->cgroup, limits->soft, limits->hard, before.used);
    fclose(file);
    return device->parent >= 0 ? NOT_SUPPORTED : SUCCESS;
}

/* NVML's size protocol: the count is the capacity on input and the actual number on output. */
static int list(const Device *device, unsigned kind, unsigned *count, Process *out)
{
    unsigned found = 0, capacity = out ? *count : 0;
    for (size_t i = 0; i < device->process_count; i++)
        if (device->kinds[i] & kind) {
            if (found < capacity)
                out[found] = device->processes[i];
            found++;
        }
    *count = found;
    return found > capacity ? INSUFFICIENT_SIZE : SUCCESS;
}

#define LIST(function, kind)                                      \
    int function(void *handle, unsigned *count, Process *out)     \
    {                                                             \
        BEGIN_DEVICE;                                             \
        return list(device, kind, count, out);                    \
    }

LIST(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS)

GETTER(nvmlDeviceGetMinorNumber, minor, unsigned)
GETTER(nvmlDeviceGetGpuInstanceId, gpu_instance, unsigned)
GETTER(nvmlDeviceGetComputeInstanceId, compute_instance, unsigned)

int nvmlDeviceGetMigMode(void *handle, unsigned *mode, unsigned *pending)
{
    BEGIN_DEVICE;
    NEED(mig_mode);
    *mode = *pending = (unsigned)device->number[N_mig_mode];
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count)
{
    BEGIN_DEVICE;
    NEED(mig_mode);
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **out)
{
    BEGIN_DEVICE;
    Device *instance = device->parent < 0 ? nth(index, (int)(device - world()->devices)) : NULL;
    if (!instance)
        return NOT_FOUND;
    *out = handle_of(instance);
    return SUCCESS;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out)
{
    BEGIN_DEVICE;
    if (device->parent < 0)
        return INVALID_ARGUMENT;
    *out = handle_of(&world()->devices[device->parent]);
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *out)
{
    BEGIN_DEVICE;
    *out = device->parent >= 0;
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(void *handle, Bytes *out)
{
    BEGIN_DEVICE;
    *out = 0x1f;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *handle, Bytes types, void *set) { BEGIN_DEVICE; return SUCCESS; }

int nvmlEventSetCreate(void **set)
{
    BEGIN;
    *set = (void *)(uintptr_t)1;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) { return begin(__func__, ""); }

/* Each event of the file is returned once after each change of the file. */
int nvmlEventSetWait_v2(void *set, EventData *out, unsigned milliseconds)
{
    BEGIN;
    World *w = world();
    if (w->next_event == w->event_count) {
        usleep(milliseconds * 1000);
        return TIMEOUT;
    }
    const Event *event = &w->events[w->next_event++];
    *out = (EventData){NULL, event->type, event->data, ~0u, ~0u};
    for (size_t i = 0; i < w->device_count; i++)
        if (!strcmp(w->devices[i].uuid, event->uuid))
            out->device = handle_of(&w->devices[i]);
    return SUCCESS;
}
