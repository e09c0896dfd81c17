/* A libnvidia-ml.so.1 whose hardware is a text file, so that tests run the real nvidia-ml-py binding.

   Every call reads the file that NVML_STUB_FILE names, so the hardware can change under a running process. A line each:

       gpu UUID TOTAL_MIB USED_MIB UTIL_PERCENT TEMPERATURE NAME WITH SPACES
       process UUID PID USED_MIB          (-1: the driver cannot tell, as for MIG and in some containers)
       fail FUNCTION RETURN_CODE          (every version of it: nvmlDeviceGetCount is also nvmlDeviceGetCount_v2)

   Without the variable or the file there is no driver. A file that cannot be understood is an unknown error, with the
   line on stderr. A handle means a UUID for as long as the process lives: a GPU whose line is gone is lost, whichever
   index others have now. Layouts and codes are those of pynvml.py 13.615, which has them from nvml.h. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15, VERSION_MISMATCH = 25, UNKNOWN = 999,
};
enum { GPUS = 64, PROCESSES = 1024, FAILURES = 64, TEXT = 96 };
#define MEMORY_V2 0x02000028u
#define TEMPERATURE_V1 0x0100000Cu

typedef unsigned long long u64;
typedef const char *Handle; /* an element of `known` */
typedef struct { char uuid[TEXT], name[TEXT]; u64 total, used; unsigned utilization; int temperature; } Gpu;
typedef struct { char uuid[TEXT]; unsigned pid; u64 used; } Process;
typedef struct { char function[TEXT]; int code; } Failure;
typedef struct {
    int gpus, processes, failures;
    Gpu gpu[GPUS];
    Process process[PROCESSES];
    Failure failure[FAILURES];
} Machine;

typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version, sensor; int temperature; } Temperature;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } ProcessInfo; /* v2 and v3 alike */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized;            /* nvmlInit calls without their nvmlShutdown */
static char known[GPUS][TEXT];     /* UUIDs that were given a handle */

static u64 bytes(long long mib) { return mib < 0 ? ~0ULL : (u64)mib << 20; }

static int understood(Machine *now, const char *line) {
    char name[TEXT];
    long long total, used;
    if (now->gpus < GPUS && now->processes < PROCESSES && now->failures < FAILURES) {
        Gpu *gpu = &now->gpu[now->gpus];
        Process *process = &now->process[now->processes];
        Failure *failure = &now->failure[now->failures];
        if (sscanf(line, "gpu %95s %lld %lld %u %d %95[^\n]", gpu->uuid, &total, &used, &gpu->utilization,
                   &gpu->temperature, name) == 6) {
            gpu->total = bytes(total), gpu->used = bytes(used), strcpy(gpu->name, name);
            return ++now->gpus;
        }
        if (sscanf(line, "process %95s %u %lld", process->uuid, &process->pid, &used) == 3) {
            process->used = bytes(used);
            return ++now->processes;
        }
        if (sscanf(line, "fail %95s %d", failure->function, &failure->code) == 2) return ++now->failures;
    }
    return line[strspn(line, " \n")] == '\0';
}

static int failing(const Machine *now, const char *function) {
    for (int i = 0; i < now->failures; i++) {
        size_t length = strlen(now->failure[i].function);
        if (strncmp(function, now->failure[i].function, length) == 0 &&
            (function[length] == '\0' || strncmp(function + length, "_v", 2) == 0))
            return now->failure[i].code;
    }
    return SUCCESS;
}

/* The hardware as it is now; a code other than SUCCESS is what `function` must return. */
static int look(const char *function, Machine *now) {
    char line[512];
    int code = SUCCESS;
    const char *path = getenv("NVML_STUB_FILE");
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file) return DRIVER_NOT_LOADED;
    now->gpus = now->processes = now->failures = 0;
    while (fgets(line, sizeof line, file))
        if (!understood(now, line)) {
            fprintf(stderr, "stub of NVML: cannot understand a line of \"%s\", or it is one too many: %s", path, line);
            code = UNKNOWN;
        }
    fclose(file);
    return code ? code : failing(now, function);
}

static int look_initialized(const char *function, Machine *now) {
    pthread_mutex_lock(&lock);
    int ready = initialized > 0;
    pthread_mutex_unlock(&lock);
    return ready ? look(function, now) : UNINITIALIZED;
}

static int look_at(const char *function, Handle handle, Machine *now, const Gpu **gpu) {
    int valid = 0, code = look_initialized(function, now);
    if (code) return code;
    for (int i = 0; i < GPUS; i++) valid |= handle == known[i];
    if (!valid) return INVALID_ARGUMENT;
    for (int i = 0; i < now->gpus; i++)
        if (strcmp(now->gpu[i].uuid, handle) == 0) return *gpu = &now->gpu[i], SUCCESS;
    return GPU_IS_LOST;
}

static int give_handle(const char *uuid, Handle *handle) {
    int i = 0;
    pthread_mutex_lock(&lock);
    while (i < GPUS && known[i][0] && strcmp(known[i], uuid)) i++;
    if (i < GPUS && !known[i][0]) strcpy(known[i], uuid);
    if (i < GPUS) *handle = known[i];
    pthread_mutex_unlock(&lock);
    return i < GPUS ? SUCCESS : UNKNOWN;
}

static int give_text(const char *text, char *buffer, unsigned length) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    Machine now;
    int code = look(__func__, &now);
    (void)flags;
    if (code || (code = failing(&now, "nvmlInit"))) return code;
    pthread_mutex_lock(&lock);
    initialized++;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    Machine now;
    int code = look_initialized(__func__, &now);
    if (code && code != DRIVER_NOT_LOADED) return code;
    pthread_mutex_lock(&lock);
    initialized--;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires restart", "The operating system has blocked the request.",
        "RM has detected an NVML/RM version mismatch.", "In use by another client", "Insufficient Memory",
    };
    return code >= 0 && code < (int)(sizeof texts / sizeof *texts) ? texts[code] : "Unknown Error";
}

/* The head of a call: `now`, and for a device its `gpu`, or the return code that is due. `valid`: the arguments are. */
#define LOOK(valid)                                                                                                    \
    Machine now;                                                                                                       \
    int code = look_initialized(__func__, &now);                                                                       \
    if (code || !(valid)) return code ? code : INVALID_ARGUMENT
#define LOOK_AT(handle, valid)                                                                                         \
    Machine now;                                                                                                       \
    const Gpu *gpu;                                                                                                    \
    int code = look_at(__func__, handle, &now, &gpu);                                                                  \
    if (code || !(valid)) return code ? code : INVALID_ARGUMENT

int nvmlDeviceGetCount_v2(unsigned *count) {
    LOOK(count);
    *count = now.gpus;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
    LOOK(handle && index < (unsigned)now.gpus);
    return give_handle(now.gpu[index].uuid, handle);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle) {
    LOOK(uuid && handle);
    for (int i = 0; i < now.gpus; i++)
        if (strcmp(now.gpu[i].uuid, uuid) == 0) return give_handle(uuid, handle);
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(Handle handle, char *uuid, unsigned length) {
    LOOK_AT(handle, uuid);
    return give_text(gpu->uuid, uuid, length);
}

int nvmlDeviceGetName(Handle handle, char *name, unsigned length) {
    LOOK_AT(handle, name);
    return give_text(gpu->name, name, length);
}

int nvmlDeviceGetMemoryInfo(Handle handle, Memory *memory) {
    LOOK_AT(handle, memory);
    *memory = (Memory){.total = gpu->total, .free = gpu->total - gpu->used, .used = gpu->used};
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Handle handle, MemoryV2 *memory) {
    LOOK_AT(handle, memory);
    if (memory->version != MEMORY_V2) return VERSION_MISMATCH;
    *memory = (MemoryV2){.version = MEMORY_V2, .total = gpu->total, .free = gpu->total - gpu->used, .used = gpu->used};
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Handle handle, Utilization *utilization) {
    LOOK_AT(handle, utilization);
    *utilization = (Utilization){.gpu = gpu->utilization};
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Handle handle, unsigned sensor, unsigned *temperature) {
    LOOK_AT(handle, temperature && sensor == 0);
    *temperature = gpu->temperature;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureV(Handle handle, Temperature *temperature) {
    LOOK_AT(handle, temperature && temperature->sensor == 0);
    if (temperature->version != TEMPERATURE_V1) return VERSION_MISMATCH;
    temperature->temperature = gpu->temperature;
    return SUCCESS;
}

/* Sizing: a call with too little room sets `count` to the room needed. */
static int compute_processes(const char *function, Handle handle, unsigned *count, ProcessInfo *infos) {
    Machine now;
    const Gpu *gpu;
    unsigned found = 0;
    int code = look_at(function, handle, &now, &gpu);
    if (code || !count || (*count && !infos)) return code ? code : INVALID_ARGUMENT;
    for (int i = 0; i < now.processes; i++) {
        const Process *process = &now.process[i];
        if (strcmp(process->uuid, gpu->uuid)) continue;
        if (found < *count) /* no MIG instance: all ones */
            infos[found] = (ProcessInfo){process->pid, process->used, ~0u, ~0u};
        found++;
    }
    code = found > *count ? INSUFFICIENT_SIZE : SUCCESS;
    *count = found;
    return code;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Handle handle, unsigned *count, ProcessInfo *infos) {
    return compute_processes(__func__, handle, count, infos);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *count, ProcessInfo *infos) {
    return compute_processes(__func__, handle, count, infos);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle handle, unsigned *count, ProcessInfo *infos) {
    LOOK_AT(handle, count);
    (void)infos;
    *count = 0;
    return SUCCESS;
}
