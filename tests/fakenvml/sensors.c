/* Sensors: numbers of the file, each by the function that NVML has for it. */
#include "calls.h"

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

GETTER(nvmlDeviceGetPowerUsage, power, unsigned)
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
