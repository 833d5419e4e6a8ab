/* A libcuda.so.1 that suspends the programs of simulated devices: cuCheckpointProcess* with its states and failures.
 *
 *     FAKECUDA_DIR/states/PID      state of a program, if it is not running
 *     FAKECUDA_DIR/faults          lines FUNCTION PLACE ACTION, of which the first that applies is carried out once
 *     FAKECUDA_DIR/calls           each call with its result
 *     GPUMOND_SIM_DIR/DEVICE/      the devices: gpumond/sim/device.py describes their files
 *
 * PLACE is before or after the effect of the function. ACTION: a number is the result; kill ends the calling process,
 * daemon its parent, hang waits for ever. A restore into too little memory never returns (cuda-checkpoint#44).
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED, FAILED };
enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_READY = 600, ILLEGAL_STATE = 401, NOT_SUPPORTED = 801 };

static const char *root(const char *name) {
    const char *value = getenv(name);
    return value ? value : "/nonexistent";
}

static int state_of(int pid) {
    char path[512], text[16] = "";
    snprintf(path, sizeof path, "%s/states/%d", root("FAKECUDA_DIR"), pid);
    FILE *file = fopen(path, "r");
    if (!file) return RUNNING;
    if (!fgets(text, sizeof text, file)) text[0] = 0;
    fclose(file);
    return atoi(text);
}

static void set_state(int pid, int state) {
    char path[512], draft[544];
    snprintf(path, sizeof path, "%s/states/%d", root("FAKECUDA_DIR"), pid);
    snprintf(draft, sizeof draft, "%s.new.%d", path, getpid());
    FILE *file = fopen(draft, "w");
    if (!file) abort();
    fprintf(file, "%d\n", state);
    fclose(file);
    rename(draft, path);
}

static void log_call(const char *function, int pid, const char *result) {
    char path[512], line[256];
    snprintf(path, sizeof path, "%s/calls", root("FAKECUDA_DIR"));
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    int size = snprintf(line, sizeof line, "%s %d %s\n", function, pid, result);
    if (file < 0 || write(file, line, size) != size) abort();
    close(file);
}

static void wait_for_ever(void) {
    for (;;) pause();
}

/* Carries out the fault at this place, and removes it. Returns its result, 0 without one. */
static int fault(const char *function, const char *place) {
    char path[512], kept[4096] = "", line[256], name[64], where[16], action[16];
    int result = 0, found = 0;
    snprintf(path, sizeof path, "%s/faults", root("FAKECUDA_DIR"));
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        if (!found && sscanf(line, "%63s %15s %15s", name, where, action) == 3 && !strcmp(name, function) &&
            !strcmp(where, place))
            found = 1;
        else
            strncat(kept, line, sizeof kept - strlen(kept) - 1);
    }
    fclose(file);
    if (!found) return 0;
    file = fopen(path, "w");
    if (!file) abort();
    fputs(kept, file);
    fclose(file);
    log_call(function, 0, action);
    if (!strcmp(action, "kill")) kill(getpid(), SIGKILL);
    else if (!strcmp(action, "daemon")) kill(getppid(), SIGKILL);
    else if (!strcmp(action, "hang")) wait_for_ever();
    else result = atoi(action);
    return result;
}

/* Calls a function for each device with the record of the program, named PID-TICKS. Returns the sum of the results. */
static int each_record(int pid, int (*function)(const char *device, const char *record)) {
    char path[512], prefix[32];
    int sum = 0;
    DIR *devices = opendir(root("GPUMOND_SIM_DIR"));
    snprintf(prefix, sizeof prefix, "%d-", pid);
    for (struct dirent *device; devices && (device = readdir(devices));) {
        if (device->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%.200s/processes", root("GPUMOND_SIM_DIR"), device->d_name);
        DIR *records = opendir(path);
        for (struct dirent *record; records && (record = readdir(records));)
            if (!strncmp(record->d_name, prefix, strlen(prefix))) {
                snprintf(path, sizeof path, "%s/%.200s", root("GPUMOND_SIM_DIR"), device->d_name);
                sum += function(path, record->d_name);
            }
        if (records) closedir(records);
    }
    if (devices) closedir(devices);
    return sum;
}

static int is_known(const char *device, const char *record) { return 1; }

static int checkpoint(const char *device, const char *record) {
    char path[1024];
    snprintf(path, sizeof path, "%s/suspended", device);
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%s/suspended/%s", device, record);
    int file = open(path, O_WRONLY | O_CREAT, 0666);
    if (file < 0) abort();
    close(file);
    return 0;
}

static unsigned long long number(const char *path, const char *after) {
    char text[1024] = "";
    int file = open(path, O_RDONLY);
    if (file < 0 || read(file, text, sizeof text - 1) < 0) return 0;
    close(file);
    char *found = strstr(text, after);
    return found ? strtoull(found + strlen(after), NULL, 10) : 0;
}

/* Returns 1 if the device has too little free memory. The lock of the device is held as by the programs themselves. */
static int restore(const char *device, const char *record) {
    char path[1024], text[129];
    unsigned long long used = 0;
    snprintf(path, sizeof path, "%s/suspended/%s", device, record);
    if (access(path, F_OK)) return 0;
    snprintf(path, sizeof path, "%s/used", device);
    int lock = open(path, O_RDWR);
    if (lock < 0) abort();
    flock(lock, LOCK_EX);
    snprintf(path, sizeof path, "%s/processes", device);
    DIR *records = opendir(path);
    for (struct dirent *other; records && (other = readdir(records));) {
        snprintf(path, sizeof path, "%s/suspended/%.200s", device, other->d_name);
        if (other->d_name[0] == '.' || (!access(path, F_OK) && strcmp(other->d_name, record))) continue;
        if (kill(atoi(other->d_name), 0)) continue;
        snprintf(path, sizeof path, "%s/processes/%.200s", device, other->d_name);
        used += number(path, "[");
    }
    if (records) closedir(records);
    snprintf(path, sizeof path, "%s/card.json", device);
    int full = used + number(path, "\"reserved_bytes\":") > number(path, "\"size_bytes\":");
    if (!full) {
        snprintf(path, sizeof path, "%s/suspended/%s", device, record);
        unlink(path);
        snprintf(text, sizeof text, "%-128llu", used);
        if (pwrite(lock, text, 128, 0) != 128) abort();
    }
    close(lock);
    return full;
}

static int call(const char *function, int pid, int from, int to, int (*effect)(const char *, const char *)) {
    int result = fault(function, "before");
    if (!result && (kill(pid, 0) || !each_record(pid, is_known))) result = INVALID_VALUE;
    if (!result && state_of(pid) != from) result = ILLEGAL_STATE;
    if (!result) {
        if (effect && each_record(pid, effect)) {
            set_state(pid, FAILED);
            log_call(function, pid, "stuck");
            wait_for_ever();
        }
        set_state(pid, to);
        result = fault(function, "after");
    }
    char text[16];
    snprintf(text, sizeof text, "%d", result);
    log_call(function, pid, text);
    return result;
}

int cuInit(unsigned flags) { return fault("cuInit", "before"); }

int cuCheckpointProcessGetState(int pid, int *state) {
    int result = fault("state", "before");
    if (!result && kill(pid, 0)) result = INVALID_VALUE;
    if (!result) *state = state_of(pid);
    return result;
}

int cuCheckpointProcessLock(int pid, void *arguments) { return call("lock", pid, RUNNING, LOCKED, NULL); }
int cuCheckpointProcessCheckpoint(int pid, void *arguments) {
    return call("checkpoint", pid, LOCKED, CHECKPOINTED, checkpoint);
}
int cuCheckpointProcessRestore(int pid, void *arguments) { return call("restore", pid, CHECKPOINTED, LOCKED, restore); }
int cuCheckpointProcessUnlock(int pid, void *arguments) { return call("unlock", pid, LOCKED, RUNNING, NULL); }

int cuGetErrorName(int error, const char **text) {
    *text = error == ILLEGAL_STATE    ? "CUDA_ERROR_ILLEGAL_STATE"
            : error == NOT_READY      ? "CUDA_ERROR_NOT_READY"
            : error == NOT_SUPPORTED  ? "CUDA_ERROR_NOT_SUPPORTED"
            : error == INVALID_VALUE  ? "CUDA_ERROR_INVALID_VALUE"
                                      : "CUDA_ERROR_UNKNOWN";
    return SUCCESS;
}
