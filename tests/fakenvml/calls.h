/* Beginning of every function of the library, and simple getters. */
#ifndef CALLS_H
#define CALLS_H

#include "world.h"

extern int references; /* nvmlInit minus nvmlShutdown */

/* Opens a call without a device. */
#define BEGIN                                   \
    do {                                        \
        int failure = begin(__func__, "");      \
        if (!failure && !references)            \
            failure = UNINITIALIZED;            \
        if (failure)                            \
            return failure;                     \
    } while (0)

/* Opens a call on a device, which is then `device`. A hang may outlive the device, so it is looked up again. */
#define BEGIN_DEVICE                                              \
    Device *device = references ? device_of(handle) : NULL;       \
    do {                                                          \
        int failure = begin(__func__, device ? device->uuid : "stale"); \
        device = device_of(handle);                               \
        if (!failure && !references)                              \
            failure = UNINITIALIZED;                              \
        if (!failure && !device)                                  \
            failure = INVALID_ARGUMENT;                           \
        if (failure)                                              \
            return failure;                                       \
    } while (0)

#define NEED(key)                    \
    do {                             \
        if (!device->known[N_##key]) \
            return NOT_SUPPORTED;    \
    } while (0)

#define GETTER(function, key, type)            \
    int function(void *handle, type *out)      \
    {                                          \
        BEGIN_DEVICE;                          \
        NEED(key);                             \
        *out = (type)device->number[N_##key];  \
        return SUCCESS;                        \
    }

#endif
