// A fake libnvidia-ml.so.1: the ABI is the driver's, the answers are what the state file says.
//
// The state (see __init__.py, from which state.h is generated) is mapped from $FAKE_NVML_STATE, so that a test can change the
// machine under a running program. -DDRIVER=418 or 470 leaves out what those drivers did not have, so that dlsym fails.

#include <stdint.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

#ifndef DRIVER
#define DRIVER 580
#endif
#define API(name) int name

enum { OK, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, HANG = -1, ABORT = -2 };
enum { NO_DEVICE = MAX_DEVICES, FIRST_HANDLE = 0x1000, MIG_HANDLE = 0x100 };

typedef void *Handle;

static State *state;
static pid_t initialised_by;
static int initialised;  // how often

static void pause_us(int64_t us) {
  struct timespec wait = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&wait, NULL);
}

static void map_state(void) {
  const char *path = getenv("FAKE_NVML_STATE");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) {
    fprintf(stderr, "fake_nvml: FAKE_NVML_STATE does not name the state file\n");
    abort();
  }
  state = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (state == MAP_FAILED) abort();
}

static int take_time(int function, int device) {
  int64_t latency_us = state->latencies_us[function] ? state->latencies_us[function] : state->latency_us;
  if (latency_us > 0) pause_us(latency_us);
  Fault *fault = &state->faults[function][device];
  if (fault->code && fault->after > 0) {
    fault->after--;
  } else if (fault->code && fault->times != 0) {
    if (fault->times > 0) fault->times--;
    if (fault->code == ABORT) abort();
    while (__atomic_load_n(&fault->code, __ATOMIC_RELAXED) == HANG) pause_us(2000);
    return fault->code;
  }
  return device < NO_DEVICE ? state->devices[device].error : OK;
}

// What a function does before its work: it counts the call, takes its time, and fails where it shall.
static int enter(int function, int device) {
  static pthread_mutex_t entrance = PTHREAD_MUTEX_INITIALIZER;
  if (!state) map_state();
  __atomic_fetch_add(&state->calls[function], 1, __ATOMIC_RELAXED);
  if (!state->one_at_a_time) return take_time(function, device);
  pthread_mutex_lock(&entrance);
  int code = take_time(function, device);
  pthread_mutex_unlock(&entrance);
  return code;
}

// A library that was initialised by another process (before a fork) is not initialised.
#define READY() if (initialised_by != getpid()) return UNINITIALIZED
#define SYSTEM(function) do { int code = enter(F_##function, NO_DEVICE); if (code) return code; READY(); } while (0)
#define DEVICE(function) \
  DeviceState *device; Mig *mig; \
  do { READY(); int place = place_of(handle, &device, &mig); if (place < 0) return INVALID_ARGUMENT; \
       int code = enter(F_##function, place); if (code) return code; (void)mig; (void)device; } while (0)

static int place_of(Handle handle, DeviceState **device, Mig **mig) {
  intptr_t number = (intptr_t)handle - FIRST_HANDLE;
  int index = number % MIG_HANDLE, instance = number / MIG_HANDLE - 1;
  if (number < 0 || index >= state->device_count || instance >= state->devices[index].mig_count) return -1;
  *device = &state->devices[index];
  *mig = instance < 0 ? NULL : &(*device)->mig[instance];
  return index;
}

static int text(char *target, unsigned size, const char *source) {
  if (strlen(source) >= size) return INSUFFICIENT_SIZE;
  strcpy(target, source);
  return OK;
}

static int start(int function) {
  int code = enter(function, NO_DEVICE);
  if (state->init_delay_ms > 0) pause_us(state->init_delay_ms * 1000);
  if (!code) initialised = initialised_by == getpid() ? initialised + 1 : 1, initialised_by = getpid();
  return code;
}

API(nvmlInitWithFlags)(unsigned flags) { return start(F_nvmlInitWithFlags); }
API(nvmlInit_v2)(void) { return start(F_nvmlInit_v2); }
// The last of as many as there were initialisations ends the library, as in the real one.
API(nvmlShutdown)(void) { SYSTEM(nvmlShutdown); if (!--initialised) initialised_by = 0; return OK; }

const char *nvmlErrorString(int code) {
  static char buffer[40];
  snprintf(buffer, sizeof buffer, "fake error %d", code);
  return buffer;
}

API(nvmlSystemGetDriverVersion)(char *version, unsigned size) {
  SYSTEM(nvmlSystemGetDriverVersion);
  return text(version, size, state->driver_version);
}

// The real one answers before and without a successful initialisation, too.
API(nvmlSystemGetNVMLVersion)(char *version, unsigned size) {
  int code = enter(F_nvmlSystemGetNVMLVersion, NO_DEVICE);
  return code ? code : text(version, size, state->nvml_version);
}

API(nvmlSystemGetCudaDriverVersion)(int *version) {
  SYSTEM(nvmlSystemGetCudaDriverVersion);
  *version = state->cuda_version;
  return OK;
}

API(nvmlDeviceGetCount_v2)(unsigned *count) {
  SYSTEM(nvmlDeviceGetCount_v2);
  *count = state->device_count;
  return OK;
}

API(nvmlDeviceGetHandleByIndex_v2)(unsigned index, Handle *handle) {
  READY();
  if (index >= state->device_count) return INVALID_ARGUMENT;
  *handle = (Handle)(intptr_t)(FIRST_HANDLE + index);
  return enter(F_nvmlDeviceGetHandleByIndex_v2, index);
}

API(nvmlDeviceGetName)(Handle handle, char *name, unsigned size) {
  DEVICE(nvmlDeviceGetName);
  return text(name, size, mig ? mig->name : device->name);
}

API(nvmlDeviceGetUUID)(Handle handle, char *uuid, unsigned size) {
  DEVICE(nvmlDeviceGetUUID);
  return text(uuid, size, mig ? mig->uuid : device->uuid);
}

API(nvmlDeviceGetIndex)(Handle handle, unsigned *place) {
  DEVICE(nvmlDeviceGetIndex);
  if (mig) return NOT_SUPPORTED;
  *place = (unsigned)((intptr_t)handle - FIRST_HANDLE);
  return OK;
}

// Functions that give one unsigned number of the device.
#define NUMBER(function, type, field) API(function)(Handle handle, type *value) \
  { DEVICE(function); if (mig) return NOT_SUPPORTED; *value = device->field; return OK; }

NUMBER(nvmlDeviceGetMinorNumber, unsigned, minor)
NUMBER(nvmlDeviceGetFanSpeed, unsigned, fan)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, power_mw)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, power_limit_mw)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, power_limit_mw)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, energy_mj)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, pstate)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, persistence)
NUMBER(nvmlDeviceGetComputeMode, unsigned, compute_mode)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, pcie_generation)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, pcie_generation)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, pcie_width)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, retired_pages_pending)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, throttle_reasons)
#if DRIVER >= 535
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, throttle_reasons)
NUMBER(nvmlDeviceGetNumaNodeId, int, numa_node)
#endif

typedef struct { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; } PciInfo;

static int pci(PciInfo *info, const char *bus_id) {
  memset(info, 0, sizeof *info);
  strcpy(info->bus_id, bus_id);
  snprintf(info->legacy, sizeof info->legacy, "%.15s", strlen(bus_id) > 4 ? bus_id + 4 : bus_id);
  sscanf(bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
  return OK;
}

API(nvmlDeviceGetPciInfo_v3)(Handle handle, PciInfo *info) {
  DEVICE(nvmlDeviceGetPciInfo_v3);
  return pci(info, device->bus_id);
}

API(nvmlDeviceGetCpuAffinity)(Handle handle, unsigned size, unsigned long *set) {
  DEVICE(nvmlDeviceGetCpuAffinity);
  memset(set, 0, size * sizeof *set);
  set[0] = device->cpu_affinity;
  return OK;
}

API(nvmlDeviceGetMemoryAffinity)(Handle handle, unsigned size, unsigned long *set, unsigned scope) {
  DEVICE(nvmlDeviceGetMemoryAffinity);
  memset(set, 0, size * sizeof *set);
  if (device->numa_node >= 0) set[0] = 1ul << device->numa_node;
  return OK;
}

static int alive(int64_t pid) {
  char path[40], line[400];
  snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t size = read(fd, line, sizeof line - 1);
  close(fd);
  line[size > 0 ? size : 0] = 0;
  char *end = strrchr(line, ')');
  return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}

// The driver drops a process when it dies, unless the test wants a list that is wrong.
static int listed(const Process *process, const Mig *mig, int kinds) {
  if (mig && (process->gi != mig->gi || process->ci != mig->ci)) return 0;
  return (process->kind & kinds) && (process->stays || alive(process->pid));
}

static int64_t memory_of_processes(DeviceState *device, const Mig *mig) {
  int64_t sum = 0;
  for (int i = 0; i < device->process_count; i++) {
    Process *process = &device->processes[i];
    if (process->counted && process->memory > 0 && listed(process, mig, ~0)) sum += process->memory;
  }
  return sum;
}

typedef struct { unsigned long long total, reserved, free, used; } Memory;

static Memory memory_of(DeviceState *device, const Mig *mig) {
  Memory memory = {device->memory_total, device->memory_reserved, 0, device->memory_used};
  if (mig) memory = (Memory){mig->memory_total, mig->memory_reserved, 0, mig->memory_used};
  memory.used += memory_of_processes(device, mig);
  if (memory.total > memory.used + memory.reserved) memory.free = memory.total - memory.used - memory.reserved;
  return memory;
}

API(nvmlDeviceGetMemoryInfo)(Handle handle, unsigned long long *info) {
  DEVICE(nvmlDeviceGetMemoryInfo);
  Memory memory = memory_of(device, mig);
  info[0] = memory.total;
  info[1] = memory.free;
  info[2] = memory.used + memory.reserved;
  return OK;
}

#if DRIVER >= 545
typedef struct { unsigned version; unsigned char cluster[16]; int status; unsigned clique; unsigned char state; unsigned health; } Fabric;

API(nvmlDeviceGetGpuFabricInfoV)(Handle handle, Fabric *info) {
  DEVICE(nvmlDeviceGetGpuFabricInfoV);
  if (mig || device->fabric_health < 0) return NOT_SUPPORTED;
  if (info->version != (0x02000000 | sizeof *info)) return 25;
  info->state = 3;
  info->health = device->fabric_health;
  return OK;
}
#endif

#if DRIVER >= 510
typedef struct { unsigned version; Memory memory; } MemoryV2;

API(nvmlDeviceGetMemoryInfo_v2)(Handle handle, MemoryV2 *info) {
  DEVICE(nvmlDeviceGetMemoryInfo_v2);
  if (info->version != (0x02000000 | sizeof *info)) return 25;
  info->memory = memory_of(device, mig);
  return OK;
}
#endif

API(nvmlDeviceGetUtilizationRates)(Handle handle, unsigned *rates) {
  DEVICE(nvmlDeviceGetUtilizationRates);
  if (mig || device->mig_mode == 1) return NOT_SUPPORTED;
  rates[0] = device->utilization;
  rates[1] = device->memory_utilization;
  return OK;
}

static int codec(const Mig *mig, int64_t busy, unsigned *percent, unsigned *period) {
  if (mig) return NOT_SUPPORTED;
  *percent = busy;
  *period = 167000;
  return OK;
}

API(nvmlDeviceGetEncoderUtilization)(Handle handle, unsigned *percent, unsigned *period) {
  DEVICE(nvmlDeviceGetEncoderUtilization);
  return codec(mig, device->encoder_utilization, percent, period);
}

API(nvmlDeviceGetDecoderUtilization)(Handle handle, unsigned *percent, unsigned *period) {
  DEVICE(nvmlDeviceGetDecoderUtilization);
  return codec(mig, device->decoder_utilization, percent, period);
}

// No screen is there, nor a Windows driver; other monitors ask, and log a traceback where the function is missing.
API(nvmlDeviceGetDisplayActive)(Handle handle, unsigned *on) { DEVICE(nvmlDeviceGetDisplayActive); *on = 0; return OK; }
API(nvmlDeviceGetDisplayMode)(Handle handle, unsigned *on) { DEVICE(nvmlDeviceGetDisplayMode); *on = 0; return OK; }

API(nvmlDeviceGetDriverModel)(Handle handle, int *current, int *pending) {
  DEVICE(nvmlDeviceGetDriverModel);
  return NOT_SUPPORTED;
}

API(nvmlDeviceGetDriverModel_v2)(Handle handle, int *current, int *pending) {
  DEVICE(nvmlDeviceGetDriverModel_v2);
  return NOT_SUPPORTED;
}

API(nvmlDeviceGetCudaComputeCapability)(Handle handle, int *major, int *minor) {
  DEVICE(nvmlDeviceGetCudaComputeCapability);
  *major = 9, *minor = 0;
  return OK;
}

typedef struct { unsigned long long time_stamp; union { unsigned number; double real; } value; } Sample;

// Without samples of its own a device answers with 16 equal ones.
API(nvmlDeviceGetSamples)(Handle handle, int type, unsigned long long since, int *value_type, unsigned *count, Sample *samples) {
  DEVICE(nvmlDeviceGetSamples);
  if (mig || device->mig_mode == 1 || type != 1) return NOT_SUPPORTED;
  unsigned have = device->sample_count > 0 ? device->sample_count : 16;
  *value_type = 1;
  if (!samples) { *count = have; return OK; }
  if (*count > have) *count = have;
  for (unsigned i = 0; i < *count; i++) {
    samples[i].time_stamp = 1000000ull + i * 166666;
    samples[i].value.number = device->sample_count > 0 ? device->samples[i] : device->utilization;
  }
  return OK;
}

API(nvmlDeviceGetTemperature)(Handle handle, int sensor, unsigned *celsius) {
  DEVICE(nvmlDeviceGetTemperature);
  if (mig) return NOT_SUPPORTED;
  *celsius = device->temperature;
  return OK;
}

API(nvmlDeviceGetTemperatureThreshold)(Handle handle, int threshold, unsigned *celsius) {
  DEVICE(nvmlDeviceGetTemperatureThreshold);
  if (mig || threshold > 1) return NOT_SUPPORTED;
  *celsius = threshold == 0 ? device->temperature_shutdown : device->temperature_slowdown;
  return OK;
}

API(nvmlDeviceGetClockInfo)(Handle handle, int type, unsigned *mhz) {
  DEVICE(nvmlDeviceGetClockInfo);
  if (mig) return NOT_SUPPORTED;
  *mhz = type == 2 ? device->clock_memory : type == 3 ? device->clock_video : device->clock_sm;
  return OK;
}

API(nvmlDeviceGetMaxClockInfo)(Handle handle, int type, unsigned *mhz) {
  DEVICE(nvmlDeviceGetMaxClockInfo);
  if (mig) return NOT_SUPPORTED;
  *mhz = type == 2 ? device->clock_memory_max : device->clock_sm_max;
  return OK;
}

API(nvmlDeviceGetEccMode)(Handle handle, unsigned *current, unsigned *pending) {
  DEVICE(nvmlDeviceGetEccMode);
  *current = *pending = device->ecc;
  return OK;
}

API(nvmlDeviceGetTotalEccErrors)(Handle handle, int uncorrected, int aggregate, unsigned long long *count) {
  DEVICE(nvmlDeviceGetTotalEccErrors);
  if (!device->ecc) return NOT_SUPPORTED;
  const int64_t counts[2][2] = {{device->ecc_corrected_volatile, device->ecc_corrected_aggregate},
                                {device->ecc_uncorrected_volatile, device->ecc_uncorrected_aggregate}};
  *count = counts[uncorrected & 1][aggregate & 1];
  return OK;
}

API(nvmlDeviceGetRetiredPages)(Handle handle, int cause, unsigned *count, unsigned long long *pages) {
  DEVICE(nvmlDeviceGetRetiredPages);
  unsigned have = cause == 0 ? device->retired_pages : 0, room = pages ? *count : 0;
  *count = have;
  if (room < have) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < have; i++) pages[i] = 0x1000ull * (i + 1);
  return OK;
}

API(nvmlDeviceGetPcieThroughput)(Handle handle, int counter, unsigned *kilobytes) {
  DEVICE(nvmlDeviceGetPcieThroughput);
  if (mig) return NOT_SUPPORTED;
  *kilobytes = counter == 0 ? device->pcie_tx_kbs : device->pcie_rx_kbs;
  return OK;
}

typedef struct {
  unsigned id, scope;
  long long time_stamp, latency_us;
  int type, code;
  unsigned long long value;
} FieldValue;

// The counters of NVLink alone: 138 sent, 139 received, in KiB, of link *scope*.
API(nvmlDeviceGetFieldValues)(Handle handle, int count, FieldValue *values) {
  DEVICE(nvmlDeviceGetFieldValues);
  for (int i = 0; i < count; i++) {
    int known = !mig && (values[i].id == 138 || values[i].id == 139) && values[i].scope < MAX_LINKS;
    values[i].code = known && device->links[values[i].scope].active ? OK : NOT_SUPPORTED;
    values[i].time_stamp = device->nvlink_time_us;
    values[i].type = 3;  // unsigned long long
    values[i].value = values[i].id == 138 ? device->nvlink_tx_kib : device->nvlink_rx_kib;
  }
  return OK;
}

API(nvmlDeviceGetNvLinkState)(Handle handle, unsigned link, unsigned *active) {
  DEVICE(nvmlDeviceGetNvLinkState);
  if (mig || link >= MAX_LINKS) return INVALID_ARGUMENT;
  *active = device->links[link].active;
  return OK;
}

API(nvmlDeviceGetNvLinkRemotePciInfo_v2)(Handle handle, unsigned link, PciInfo *info) {
  DEVICE(nvmlDeviceGetNvLinkRemotePciInfo_v2);
  if (mig || link >= MAX_LINKS) return INVALID_ARGUMENT;
  return device->links[link].active ? pci(info, device->links[link].remote_bus_id) : NOT_SUPPORTED;
}

API(nvmlDeviceGetTopologyCommonAncestor)(Handle handle, Handle other, int *level) {
  DEVICE(nvmlDeviceGetTopologyCommonAncestor);
  int index = (intptr_t)other - FIRST_HANDLE;
  if (mig || index < 0 || index >= state->device_count) return INVALID_ARGUMENT;
  *level = device->topology[index];
  return OK;
}

static int processes(DeviceState *device, const Mig *mig, int kind, int stride, unsigned *count, char *rows) {
  unsigned have = 0, room = rows ? *count : 0;
  for (int i = 0; i < device->process_count; i++) have += listed(&device->processes[i], mig, kind);
  *count = have;
  if (room < have) return INSUFFICIENT_SIZE;
  for (int i = 0; i < device->process_count; i++) {
    Process *process = &device->processes[i];
    if (!listed(process, mig, kind)) continue;
    _Alignas(8) char row[32] = {0};
    *(uint32_t *)row = process->pid;
    *(int64_t *)(row + 8) = process->memory;
    *(uint32_t *)(row + 16) = process->gi;
    *(uint32_t *)(row + 20) = process->ci;
    memcpy(rows, row, stride);
    rows += stride;
  }
  return OK;
}

// A test can make the rows longer or shorter than the caller believes (process_stride), as mismatched versions do.
#define PROCESSES(function, kind, size) \
  API(function)(Handle handle, unsigned *count, char *rows) { \
    DEVICE(function); return processes(device, mig, kind, size ? size : device->process_stride, count, rows); }

PROCESSES(nvmlDeviceGetComputeRunningProcesses, 1, 16)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, 2, 16)
#if DRIVER >= 460
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 1, 0)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, 2, 0)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, 4, 0)
#endif
#if DRIVER >= 510
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 1, 0)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 2, 0)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 4, 0)
#endif

typedef struct { unsigned pid; unsigned long long time_stamp; unsigned sm, memory, encoder, decoder; } ProcessSample;

// A driver that samples goes on by itself: a negative time stamp is its period, in microseconds.
static unsigned long long stamp_of(const Process *process) {
  if (process->time_stamp >= 0) return process->time_stamp;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  unsigned long long period = -process->time_stamp;
  return (now.tv_sec * 1000000ull + now.tv_nsec / 1000) / period * period;
}

API(nvmlDeviceGetProcessUtilization)(Handle handle, ProcessSample *samples, unsigned *count, unsigned long long since) {
  DEVICE(nvmlDeviceGetProcessUtilization);
  if (mig || device->mig_mode == 1) return NOT_SUPPORTED;
  device->last_seen_time_stamp = since;
  unsigned have = 0, room = samples ? *count : 0;
  for (int i = 0; i < device->process_count; i++) {
    Process *process = &device->processes[i];
    if (!listed(process, NULL, ~0) || stamp_of(process) <= since) continue;
    if (have < room)
      samples[have] = (ProcessSample){process->pid,
                                      stamp_of(process),
                                      process->sm_utilization,
                                      process->memory_utilization,
                                      process->encoder_utilization,
                                      process->decoder_utilization};
    have++;
  }
  *count = have;
  return have == 0 ? NOT_FOUND : have > room ? INSUFFICIENT_SIZE : OK;
}

#if DRIVER >= 450
API(nvmlDeviceGetRemappedRows)(Handle handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  DEVICE(nvmlDeviceGetRemappedRows);
  if (mig) return NOT_SUPPORTED;
  *corrected = device->remapped_corrected;
  *uncorrected = device->remapped_uncorrected;
  *pending = device->remap_pending;
  *failed = device->remap_failed;
  return OK;
}

API(nvmlDeviceGetMigMode)(Handle handle, unsigned *current, unsigned *pending) {
  DEVICE(nvmlDeviceGetMigMode);
  if (mig || device->mig_mode < 0) return NOT_SUPPORTED;
  *current = *pending = device->mig_mode;
  return OK;
}

API(nvmlDeviceGetMaxMigDeviceCount)(Handle handle, unsigned *count) {
  DEVICE(nvmlDeviceGetMaxMigDeviceCount);
  *count = device->mig_mode < 0 ? 0 : 7;
  return OK;
}

// A place without an instance is NOT_FOUND, and the places that are taken need not be the first ones.
API(nvmlDeviceGetMigDeviceHandleByIndex)(Handle handle, unsigned index, Handle *found) {
  DEVICE(nvmlDeviceGetMigDeviceHandleByIndex);
  if (index >= device->mig_count || !device->mig[index].memory_total) return NOT_FOUND;
  *found = (Handle)((intptr_t)handle + MIG_HANDLE * (index + 1));
  return OK;
}

API(nvmlDeviceGetGpuInstanceId)(Handle handle, unsigned *id) {
  DEVICE(nvmlDeviceGetGpuInstanceId);
  if (!mig) return NOT_SUPPORTED;
  *id = mig->gi;
  return OK;
}

API(nvmlDeviceGetComputeInstanceId)(Handle handle, unsigned *id) {
  DEVICE(nvmlDeviceGetComputeInstanceId);
  if (!mig) return NOT_SUPPORTED;
  *id = mig->ci;
  return OK;
}

typedef struct { unsigned counts[6], gpu_slices, compute_slices; unsigned long long megabytes; } Attributes;

API(nvmlDeviceGetAttributes_v2)(Handle handle, Attributes *attributes) {
  DEVICE(nvmlDeviceGetAttributes_v2);
  if (!mig) return NOT_SUPPORTED;
  memset(attributes, 0, sizeof *attributes);
  attributes->counts[0] = 16 * mig->compute_slices;
  attributes->gpu_slices = mig->gpu_slices;
  attributes->compute_slices = mig->compute_slices;
  attributes->megabytes = mig->memory_total >> 20;
  return OK;
}
#endif
