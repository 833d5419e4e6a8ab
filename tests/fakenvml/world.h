/* State of the fake driver: the text file named by FAKENVML_FILE, parsed. See __init__.py for its writer. */
#ifndef WORLD_H
#define WORLD_H

#include <stdbool.h>
#include <stddef.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED = 9,
       TIMEOUT, FUNCTION_NOT_FOUND = 13, INSUFFICIENT_RESOURCES = 23, ARGUMENT_VERSION_MISMATCH = 25 };
enum { COMPUTE = 1, GRAPHICS = 2, MPS = 4 };
enum { TEXT = 96 };

typedef unsigned long long Bytes;

/* Numbers of a device, by the key that sets them in the file. A number that is not set is not supported. */
#define NUMBERS(X) \
    X(minor) X(total) X(reserved) X(free) X(used) X(gpu_utilization) X(memory_utilization) X(sm_clock) X(memory_clock) \
    X(max_sm_clock) X(max_memory_clock) X(temperature) X(power) X(power_limit) X(energy) X(performance_state) X(fan) \
    X(ecc_corrected) X(ecc_uncorrected) X(pcie_transmit) X(pcie_receive) X(encoder) X(decoder) X(throttle) \
    X(ecc_corrected_aggregate) X(ecc_uncorrected_aggregate) X(memory_temperature) X(slowdown_temperature) \
    X(shutdown_temperature) X(persistence) X(compute_mode) X(bar1_total) X(bar1_used) X(pcie_generation) \
    X(pcie_generation_max) X(pcie_width) X(pcie_width_max) X(pcie_replays) X(retired_single_bit) \
    X(retired_double_bit) X(retired_pending) X(remapped_correctable) X(remapped_uncorrectable) X(remapped_pending) \
    X(remapped_failure) X(nvlink_crc_flit) X(nvlink_crc_data) X(nvlink_replay) X(nvlink_recovery) \
    X(gpm_permille) X(process_sampling) X(partition_total) X(partition_used) X(virtualization) X(addressing) X(numa_node) X(mig_mode) X(gpu_instance) X(compute_instance)
#define ENUMERATE(key) N_##key,
enum Number { NUMBERS(ENUMERATE) NUMBER_COUNT };

typedef struct {
    unsigned pid;
    Bytes used;
    unsigned gpu_instance, compute_instance;
} Process; /* nvmlProcessInfo_v2_t */

typedef struct {
    char uuid[TEXT], name[TEXT], pci_bus_id[TEXT];
    unsigned handle;
    int parent; /* position of the device that this MIG instance is part of, -1 for a device */
    bool known[NUMBER_COUNT];
    Bytes number[NUMBER_COUNT];
    size_t process_count;
    Process *processes;
    unsigned char *kinds;
    int *utilization; /* percent, of each process; -1 if it has not used the device lately */
} Device;

typedef struct {
    char uuid[TEXT];
    Bytes type, data;
} Event;

typedef struct {
    char function[TEXT], selector[TEXT], action[TEXT];
    double value;
    unsigned long after, times, seen;
} Fault;

typedef struct {
    char driver_version[TEXT], nvml_version[TEXT];
    int cuda_version;
    size_t device_count, fault_count, event_count, next_event;
    Device *devices;
    Fault *faults;
    Event *events;
} World;

/* The world as it is now, re-read if the file has changed; NULL while there is no file. */
World *world(void);

/* Begins a call: counts it, applies its faults. Returns the code with which the call has to end at once, or SUCCESS.
   `selector` is a UUID, or "" for a call that concerns no device. */
int begin(const char *function, const char *selector);

/* The device of a handle, NULL if there is no such handle (anymore). */
Device *device_of(void *handle);

#endif
