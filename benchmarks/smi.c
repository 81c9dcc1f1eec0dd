// An `nvidia-smi` for genv, which asks no library: it asks the driver library for what it prints, one call per field of
// each device, and does nothing else.  The real one starts slower and calls more.
//     nvidia-smi --query-gpu=FIELD[,FIELD...] | --query-compute-apps=gpu_uuid,pid,used_gpu_memory   (csv without header)

#include <stdio.h>
#include <string.h>

enum { MIB = 1 << 20, LENGTH = 96, MOST = 8192 };

typedef void *Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

int nvmlInit_v2(void), nvmlShutdown(void), nvmlDeviceGetCount_v2(unsigned *), nvmlDeviceGetHandleByIndex_v2(unsigned, Device *);
int nvmlDeviceGetUUID(Device, char *, unsigned), nvmlDeviceGetUtilizationRates(Device, unsigned *);
int nvmlDeviceGetMemoryInfo(Device, Memory *), nvmlDeviceGetTemperature(Device, int, unsigned *);
int nvmlDeviceGetComputeRunningProcesses_v3(Device, unsigned *, Process *);

static int print(const char *field, unsigned index, Device device) {
  char uuid[LENGTH];
  unsigned number[2];
  Memory memory;
  int memory_used = !strcmp(field, "memory.used");
  if (!strcmp(field, "index")) return printf("%u", index) < 0;
  if (!strcmp(field, "uuid")) return nvmlDeviceGetUUID(device, uuid, LENGTH) || printf("%s", uuid) < 0;
  if (!strcmp(field, "utilization.gpu")) return nvmlDeviceGetUtilizationRates(device, number) || printf("%u", number[0]) < 0;
  if (!strcmp(field, "temperature.gpu")) return nvmlDeviceGetTemperature(device, 0, number) || printf("%u", number[0]) < 0;
  if (!memory_used && strcmp(field, "memory.total")) return 1;
  return nvmlDeviceGetMemoryInfo(device, &memory) || printf("%llu", (memory_used ? memory.used : memory.total) / MIB) < 0;
}

static int print_fields(char *fields, unsigned index, Device device) {
  int failed = 0;
  for (char *field = strtok(fields, ","); field && !failed; field = strtok(NULL, ",")) {
    if (field != fields) printf(", ");
    failed = print(field, index, device);
  }
  printf("\n");
  return failed;
}

static int print_processes(Device device) {
  static Process found[MOST];
  char uuid[LENGTH];
  unsigned count = MOST;
  if (nvmlDeviceGetUUID(device, uuid, LENGTH) || nvmlDeviceGetComputeRunningProcesses_v3(device, &count, found)) return 1;
  for (unsigned each = 0; each < count; each++) printf("%s, %u, %llu\n", uuid, found[each].pid, found[each].used / MIB);
  return 0;
}

int main(int words, char **word) {
  char fields[LENGTH] = "";
  int processes = words > 1 && !strcmp(word[1], "--query-compute-apps=gpu_uuid,pid,used_gpu_memory");
  if (!processes && (words < 2 || sscanf(word[1], "--query-gpu=%95s", fields) != 1)) return 2;
  unsigned count = 0;
  int failed = nvmlInit_v2() || nvmlDeviceGetCount_v2(&count);
  for (unsigned index = 0; index < count && !failed; index++) {
    char copy[LENGTH];
    Device device;
    failed = nvmlDeviceGetHandleByIndex_v2(index, &device);
    if (!failed) failed = processes ? print_processes(device) : print_fields(strcpy(copy, fields), index, device);
  }
  nvmlShutdown();
  return failed;
}
