/* Sensors: numbers of the file, each by the function that NVML has for it. */
#include "calls.h"

#include <stdlib.h>
#include <time.h>

typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version, sensor; int temperature; } TemperatureV1;
typedef struct { Bytes total, free, used; } Bar1;
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type;
    int code;
    Bytes value;
} FieldValue;

typedef struct { unsigned version, value; } AddressingMode;
typedef struct { unsigned pid; Bytes timestamp; unsigned sm, memory, encoder, decoder; } UtilizationSample;

GETTER(nvmlDeviceGetPowerUsage, power, unsigned)
GETTER(nvmlDeviceGetVirtualizationMode, virtualization, unsigned)
GETTER(nvmlDeviceGetNumaNodeId, numa_node, int)
GETTER(nvmlDeviceGetEnforcedPowerLimit, power_limit, unsigned)
GETTER(nvmlDeviceGetPowerManagementLimit, power_limit, unsigned)
GETTER(nvmlDeviceGetTotalEnergyConsumption, energy, Bytes)
GETTER(nvmlDeviceGetPerformanceState, performance_state, unsigned)
GETTER(nvmlDeviceGetPowerState, performance_state, unsigned)
GETTER(nvmlDeviceGetFanSpeed, fan, unsigned)
GETTER(nvmlDeviceGetPersistenceMode, persistence, unsigned)
GETTER(nvmlDeviceGetComputeMode, compute_mode, unsigned)
GETTER(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation, unsigned)
GETTER(nvmlDeviceGetMaxPcieLinkGeneration, pcie_generation_max, unsigned)
GETTER(nvmlDeviceGetCurrPcieLinkWidth, pcie_width, unsigned)
GETTER(nvmlDeviceGetMaxPcieLinkWidth, pcie_width_max, unsigned)
GETTER(nvmlDeviceGetPcieReplayCounter, pcie_replays, unsigned)
GETTER(nvmlDeviceGetRetiredPagesPendingStatus, retired_pending, unsigned)
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, throttle, Bytes)
GETTER(nvmlDeviceGetCurrentClocksEventReasons, throttle, Bytes)

/* A getter with an argument that chooses between two numbers. */
#define CHOICE(function, other_if, other, key, type)                              \
    int function(void *handle, unsigned choice, type *out)                        \
    {                                                                             \
        BEGIN_DEVICE;                                                             \
        int chosen = (other_if) ? N_##other : N_##key;                            \
        *out = (type)device->number[chosen];                                      \
        return device->known[chosen] ? SUCCESS : NOT_SUPPORTED;                   \
    }

CHOICE(nvmlDeviceGetClockInfo, choice == 2, memory_clock, sm_clock, unsigned)
CHOICE(nvmlDeviceGetMaxClockInfo, choice == 2, max_memory_clock, max_sm_clock, unsigned)
CHOICE(nvmlDeviceGetTemperature, choice == 0, temperature, temperature, unsigned)
CHOICE(nvmlDeviceGetPcieThroughput, choice == 1, pcie_receive, pcie_transmit, unsigned)

CHOICE(nvmlDeviceGetTemperatureThreshold, choice == 1, slowdown_temperature, shutdown_temperature, unsigned)

int nvmlDeviceGetTotalEccErrors(void *handle, unsigned type, unsigned counter, Bytes *out)
{
    BEGIN_DEVICE;
    static const int chosen[2][2] = {{N_ecc_corrected, N_ecc_corrected_aggregate},
                                     {N_ecc_uncorrected, N_ecc_uncorrected_aggregate}};
    int number = chosen[type != 0][counter != 0];
    *out = device->number[number];
    return device->known[number] ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperatureV(void *handle, TemperatureV1 *out)
{
    BEGIN_DEVICE;
    NEED(temperature);
    if (out->version != (sizeof *out | 1u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    out->temperature = (int)device->number[N_temperature];
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *out)
{
    BEGIN_DEVICE;
    NEED(gpu_utilization);
    out->gpu = (unsigned)device->number[N_gpu_utilization];
    out->memory = (unsigned)device->number[N_memory_utilization];
    return SUCCESS;
}

int nvmlDeviceGetAddressingMode(void *handle, AddressingMode *out)
{
    BEGIN_DEVICE;
    NEED(addressing);
    if (out->version != (sizeof *out | 1u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    out->value = (unsigned)device->number[N_addressing];
    return SUCCESS;
}

typedef struct { unsigned version, is_supported; } GpmSupport;
typedef struct { unsigned id; int code; double value; const char *info[3]; } GpmMetric;
typedef struct { unsigned version, count; int *sample1, *sample2; GpmMetric metrics[]; } GpmQuestion;

static int samples_held;

int nvmlGpmQueryDeviceSupport(void *handle, GpmSupport *out)
{
    BEGIN_DEVICE;
    out->is_supported = device->known[N_gpm_permille];
    return SUCCESS;
}

int nvmlGpmSampleAlloc(int **out)
{
    BEGIN;
    if (samples_held >= 2 * 64) /* two for each device of the largest machine: more are not freed */
        return INSUFFICIENT_RESOURCES;
    samples_held++;
    *out = calloc(1, sizeof **out);
    return *out ? SUCCESS : INSUFFICIENT_RESOURCES;
}

int nvmlGpmSampleFree(int *sample)
{
    samples_held--;
    free(sample);
    return SUCCESS;
}

int nvmlGpmSampleGet(void *handle, int *sample)
{
    BEGIN_DEVICE;
    NEED(gpm_permille);
    *sample = (int)device->number[N_gpm_permille];
    return SUCCESS;
}

/* Each metric is the mean of the two samples, in tenths, plus its number. */
int nvmlGpmMetricsGet(GpmQuestion *question)
{
    BEGIN;
    if (question->version != 1)
        return ARGUMENT_VERSION_MISMATCH;
    for (unsigned i = 0; i < question->count; i++) {
        GpmMetric *metric = &question->metrics[i];
        metric->code = metric->id == 3 ? NOT_SUPPORTED : SUCCESS;
        metric->value = (*question->sample1 + *question->sample2) / 20.0 + metric->id;
    }
    return SUCCESS;
}

/* Samples do not expire: `since` is trusted only if it is in the future. */
int nvmlDeviceGetProcessUtilization(void *handle, UtilizationSample *out, unsigned *count, Bytes since)
{
    BEGIN_DEVICE;
    NEED(process_sampling);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    Bytes stamp = (Bytes)now.tv_sec * 1000000 + (Bytes)now.tv_nsec / 1000;
    unsigned found = 0, capacity = out ? *count : 0;
    for (size_t i = 0; i < device->process_count && since < stamp; i++)
        if (device->utilization[i] >= 0 && found++ < capacity)
            out[found - 1] = (UtilizationSample){device->processes[i].pid, stamp,
                                                 (unsigned)device->utilization[i], 0, 0, 0};
    *count = found;
    return found > capacity ? INSUFFICIENT_SIZE : found ? SUCCESS : NOT_FOUND;
}

#define CODEC(function, key)                                          \
    int function(void *handle, unsigned *out, unsigned *period)       \
    {                                                                 \
        BEGIN_DEVICE;                                                 \
        NEED(key);                                                    \
        *out = (unsigned)device->number[N_##key];                     \
        *period = 1000000;                                            \
        return SUCCESS;                                               \
    }

CODEC(nvmlDeviceGetEncoderUtilization, encoder)
CODEC(nvmlDeviceGetDecoderUtilization, decoder)

int nvmlDeviceGetBAR1MemoryInfo(void *handle, Bar1 *out)
{
    BEGIN_DEVICE;
    NEED(bar1_total);
    const Bytes *number = device->number;
    *out = (Bar1){number[N_bar1_total], number[N_bar1_total] - number[N_bar1_used], number[N_bar1_used]};
    return SUCCESS;
}

int nvmlDeviceGetRetiredPages(void *handle, unsigned cause, unsigned *count, Bytes *addresses)
{
    BEGIN_DEVICE;
    int chosen = cause == 0 ? N_retired_single_bit : N_retired_double_bit;
    if (!device->known[chosen])
        return NOT_SUPPORTED;
    unsigned capacity = addresses ? *count : 0;
    *count = (unsigned)device->number[chosen];
    for (unsigned i = 0; i < *count && i < capacity; i++)
        addresses[i] = 0x1000ull * (i + 1);
    return *count > capacity ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                              unsigned *failure)
{
    BEGIN_DEVICE;
    NEED(remapped_correctable);
    *correctable = (unsigned)device->number[N_remapped_correctable];
    *uncorrectable = (unsigned)device->number[N_remapped_uncorrectable];
    *pending = (unsigned)device->number[N_remapped_pending];
    *failure = (unsigned)device->number[N_remapped_failure];
    return SUCCESS;
}

/* Each field has a code of its own. */
int nvmlDeviceGetFieldValues(void *handle, int count, FieldValue *values)
{
    static const struct { unsigned field, type; int number; } known[] = {
        {38, 3, N_nvlink_crc_flit}, {45, 3, N_nvlink_crc_data}, {52, 3, N_nvlink_replay},
        {59, 3, N_nvlink_recovery}, {82, 1, N_memory_temperature}};
    BEGIN_DEVICE;
    for (int i = 0; i < count; i++) {
        values[i].code = NOT_SUPPORTED;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            if (values[i].field == known[k].field && device->known[known[k].number]) {
                values[i].type = known[k].type;
                values[i].value = device->number[known[k].number];
                values[i].code = SUCCESS;
            }
    }
    return SUCCESS;
}
