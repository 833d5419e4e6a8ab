#define _GNU_SOURCE
#include "world.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NAME(key) #key,
static const char *const number_names[] = {NUMBERS(NAME)};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static World *current, *previous; /* the previous one outlives a reload, since another thread may be reading it */
static struct stat loaded;
static unsigned last_handle = 0x1000;

/* Appends one zeroed element, and returns it. */
static void *append(void *array, size_t *count, size_t size)
{
    char **elements = array;
    if ((*count & (*count - 1)) == 0) {
        char *grown = realloc(*elements, (*count ? *count * 2 : 1) * size);
        if (!grown)
            abort();
        *elements = grown;
    }
    return memset(*elements + (*count)++ * size, 0, size);
}

static void copy(char *to, const char *from)
{
    snprintf(to, TEXT, "%s", from);
}

static unsigned handle_for(const char *uuid)
{
    for (size_t i = 0; current && i < current->device_count; i++)
        if (!strcmp(current->devices[i].uuid, uuid))
            return current->devices[i].handle;
    return ++last_handle; /* a device that was gone and is back has a new handle */
}

static Device *add_device(World *w, const char *uuid, bool is_instance)
{
    int parent = -1;
    if (is_instance)
        for (size_t i = 0; i < w->device_count; i++)
            if (w->devices[i].parent < 0)
                parent = (int)i;
    Device *device = append(&w->devices, &w->device_count, sizeof *device);
    copy(device->uuid, uuid);
    device->parent = parent;
    device->handle = handle_for(uuid);
    return device;
}

static void add_process(Device *device, const char *text)
{
    unsigned kinds;
    int utilization;
    Process process;
    if (sscanf(text, "%u %u %llu %u %u %d", &kinds, &process.pid, &process.used, &process.gpu_instance,
               &process.compute_instance, &utilization) != 6)
        abort();
    size_t count = device->process_count;
    *(unsigned char *)append(&device->kinds, &count, sizeof *device->kinds) = (unsigned char)kinds;
    count = device->process_count;
    *(int *)append(&device->utilization, &count, sizeof *device->utilization) = utilization;
    *(Process *)append(&device->processes, &device->process_count, sizeof process) = process;
}

static void parse_number(Device *device, const char *key, const char *text)
{
    for (int i = 0; i < NUMBER_COUNT; i++)
        if (!strcmp(key, number_names[i])) {
            device->known[i] = true;
            device->number[i] = strtoull(text, NULL, 10);
            return;
        }
    fprintf(stderr, "fakenvml: unknown key %s\n", key);
    abort();
}

/* A line is a key, a space and a value up to its end; a device's lines follow its `device` or `instance` line. */
static void parse_line(World *w, const char *key, const char *text)
{
    Device *device = w->device_count ? &w->devices[w->device_count - 1] : NULL;
    if (!strcmp(key, "driver_version")) {
        copy(w->driver_version, text);
    } else if (!strcmp(key, "nvml_version")) {
        copy(w->nvml_version, text);
    } else if (!strcmp(key, "cuda_version")) {
        w->cuda_version = atoi(text);
    } else if (!strcmp(key, "fault")) {
        Fault *fault = append(&w->faults, &w->fault_count, sizeof *fault);
        if (sscanf(text, "%95s %95s %95s %lf %lu %lu", fault->function, fault->selector, fault->action, &fault->value,
                   &fault->after, &fault->times) != 6)
            abort();
    } else if (!strcmp(key, "device") || !strcmp(key, "instance")) {
        add_device(w, text, *key == 'i');
    } else if (!device) {
        abort();
    } else if (!strcmp(key, "name")) {
        copy(device->name, text);
    } else if (!strcmp(key, "pci_bus_id")) {
        copy(device->pci_bus_id, text);
    } else if (!strcmp(key, "process")) {
        add_process(device, text);
    } else if (!strcmp(key, "event")) {
        Event *event = append(&w->events, &w->event_count, sizeof *event);
        copy(event->uuid, device->uuid);
        if (sscanf(text, "%llu %llu", &event->type, &event->data) != 2)
            abort();
    } else {
        parse_number(device, key, text);
    }
}

static void discard(World *w)
{
    for (size_t i = 0; w && i < w->device_count; i++) {
        free(w->devices[i].processes);
        free(w->devices[i].kinds);
        free(w->devices[i].utilization);
    }
    if (w) {
        free(w->devices);
        free(w->faults);
        free(w->events);
    }
    free(w);
}

static void reload(void)
{
    const char *path = getenv("FAKENVML_FILE");
    struct stat now;
    if (!path || stat(path, &now))
        return;
    if (current && now.st_ino == loaded.st_ino && now.st_size == loaded.st_size &&
        now.st_mtim.tv_sec == loaded.st_mtim.tv_sec && now.st_mtim.tv_nsec == loaded.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "re");
    if (!file || fstat(fileno(file), &loaded))
        return;
    World *w = calloc(1, sizeof *w);
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    while ((length = getline(&line, &capacity, file)) > 0) {
        if (line[length - 1] == '\n')
            line[length - 1] = 0;
        char *text = strchr(line, ' ');
        if (!text)
            continue;
        *text++ = 0;
        parse_line(w, line, text);
    }
    free(line);
    fclose(file);
    discard(previous);
    previous = current;
    current = w;
}

World *world(void)
{
    pthread_mutex_lock(&lock);
    reload();
    World *w = current;
    pthread_mutex_unlock(&lock);
    return w;
}

Device *device_of(void *handle)
{
    World *w = world();
    for (size_t i = 0; w && i < w->device_count; i++)
        if (w->devices[i].handle == (uintptr_t)handle)
            return &w->devices[i];
    return NULL;
}

static void record(const char *function)
{
    const char *path = getenv("FAKENVML_CALLS");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd < 0)
        return;
    char line[TEXT];
    int length = snprintf(line, sizeof line, "%s\n", function);
    if (write(fd, line, (size_t)length) < 0)
        perror("fakenvml");
    close(fd);
}

static void busy(double microseconds)
{
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do
        clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - start.tv_sec) * 1e6 + (now.tv_nsec - start.tv_nsec) / 1e3 < microseconds);
}

static int play(const char *action, double value)
{
    if (!strcmp(action, "code"))
        return (int)value;
    if (!strcmp(action, "abort"))
        abort();
    if (!strcmp(action, "segv")) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    if (!strcmp(action, "busy"))
        busy(value);
    struct timespec left = {(time_t)value, (long)((value - (double)(time_t)value) * 1e9)};
    if (!strcmp(action, "hang"))
        while (nanosleep(&left, &left))
            ;
    return SUCCESS;
}

static bool matches(const char *pattern, const char *text)
{
    return !strcmp(pattern, "*") || !strcmp(pattern, text);
}

int begin(const char *function, const char *selector)
{
    record(function);
    Fault due[8]; /* copies, since a hang may outlive the world */
    size_t count = 0;
    World *w = world();
    pthread_mutex_lock(&lock);
    for (size_t i = 0; w && i < w->fault_count; i++) {
        Fault *fault = &w->faults[i];
        if (!matches(fault->function, function) || !matches(fault->selector, selector))
            continue;
        fault->seen++;
        if (fault->seen > fault->after && (!fault->times || fault->seen <= fault->after + fault->times) &&
            count < sizeof due / sizeof *due)
            due[count++] = *fault;
    }
    pthread_mutex_unlock(&lock);
    int code = SUCCESS;
    for (size_t i = 0; i < count && code == SUCCESS; i++)
        code = play(due[i].action, due[i].value);
    return code;
}
