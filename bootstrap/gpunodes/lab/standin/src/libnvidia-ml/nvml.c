// SPDX-License-Identifier: Apache-2.0
/*
 * A stand-in for NVIDIA's management library: what the device plugin, the container toolkit and nvidia-smi ask for, over
 * the files of the stand-in driver. nvml.h is that of the Go bindings; every function that is not here answers "not
 * supported" (stubs.c, made from nvml.h).
 *
 * nvidia-smi also asks for a table of internal functions. Which of its slots do what is documented in the mock library
 * of NVIDIA/k8s-test-infra (pkg/gpu/mocknvml/bridge/internal.go, Apache-2.0).
 */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include "nvml.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 16
#define CUDA_VERSION 13000
#define DRIVER_FOLDER "/proc/driver/nvidia"

struct nvmlDevice_st {
	unsigned int minor;
	unsigned int domain, bus, slot;
	unsigned int device;
	unsigned int memory_mib;
	unsigned int capability;
	unsigned int remap; /* 1: rows of its memory wait for a reset */
	char name[64], uuid[48], place[32];
};

struct nvmlEventSet_st {
	int control;
	bool watched[MAX_GPUS];
};

static struct nvmlDevice_st gpus[MAX_GPUS];
static unsigned int count;
static unsigned int uses;

static bool in_list(nvmlDevice_t gpu)
{
	return gpu >= gpus && gpu < gpus + count;
}

/* Reads the driver's file of a GPU; false when there is none. */
static bool look(const char *place, struct nvmlDevice_st *gpu, bool *lost)
{
	char path[128], line[128];
	int is_lost = 0;
	FILE *file;

	snprintf(path, sizeof(path), DRIVER_FOLDER "/gpus/%s/standin", place);
	file = fopen(path, "r");
	if (!file)
		return false;
	memset(gpu, 0, sizeof(*gpu));
	snprintf(gpu->place, sizeof(gpu->place), "%s", place);
	sscanf(place, "%x:%x:%x", &gpu->domain, &gpu->bus, &gpu->slot);
	while (fgets(line, sizeof(line), file)) {
		sscanf(line, "minor %u", &gpu->minor);
		sscanf(line, "device %x", &gpu->device);
		sscanf(line, "memory %u", &gpu->memory_mib);
		sscanf(line, "capability %u", &gpu->capability);
		sscanf(line, "lost %d", &is_lost);
		sscanf(line, "remap %u", &gpu->remap);
		sscanf(line, "name %63[^\n]", gpu->name);
		sscanf(line, "uuid %47s", gpu->uuid);
	}
	fclose(file);
	*lost = is_lost;
	return true;
}

/* Whether the GPU can be asked: it is one of ours and still answers on the bus. */
static nvmlReturn_t alive(nvmlDevice_t gpu)
{
	struct nvmlDevice_st now;
	bool lost;

	if (!uses)
		return NVML_ERROR_UNINITIALIZED;
	if (!in_list(gpu))
		return NVML_ERROR_INVALID_ARGUMENT;
	return look(gpu->place, &now, &lost) && !lost ? NVML_SUCCESS : NVML_ERROR_GPU_IS_LOST;
}

#define REQUIRE(gpu) do { nvmlReturn_t answer = alive(gpu); if (answer != NVML_SUCCESS) return answer; } while (0)

static nvmlReturn_t text(char *out, unsigned int size, const char *value)
{
	if (strlen(value) >= size)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(out, value);
	return NVML_SUCCESS;
}

/* A container sees all GPUs in /proc and the nodes of its own only; a GPU that does not start has a node that does not open. */
static bool usable(const struct nvmlDevice_st *gpu, bool lost)
{
	char path[32];
	int node;

	snprintf(path, sizeof(path), "/dev/nvidia%u", gpu->minor);
	node = open(path, O_RDWR | O_CLOEXEC);
	if (node >= 0)
		close(node);
	return node >= 0 || (lost && errno == EIO);
}

static void enumerate(void)
{
	FILE *list = popen("ls " DRIVER_FOLDER "/gpus 2>/dev/null", "r");
	char place[32];
	bool lost;

	count = 0;
	while (list && count < MAX_GPUS && fscanf(list, "%31s", place) == 1)
		if (look(place, &gpus[count], &lost) && usable(&gpus[count], lost))
			count++;
	if (list)
		pclose(list);
}

/* Opening the control node is where the real library comes to the driver, and where it hangs when that does. */
static nvmlReturn_t call_on_driver(void)
{
	int control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	bool same;

	if (control < 0)
		return access(DRIVER_FOLDER "/version", R_OK) ? NVML_ERROR_DRIVER_NOT_LOADED : NVML_ERROR_UNKNOWN;
	same = write(control, STANDIN_VERSION, strlen(STANDIN_VERSION)) > 0;
	close(control);
	return same ? NVML_SUCCESS : NVML_ERROR_LIB_RM_VERSION_MISMATCH;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	nvmlReturn_t answer;

	(void)flags;
	if (uses) {
		uses++;
		return NVML_SUCCESS;
	}
	answer = call_on_driver();
	if (answer != NVML_SUCCESS)
		return answer;
	enumerate();
	uses = 1;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlInit(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void)
{
	if (!uses)
		return NVML_ERROR_UNINITIALIZED;
	uses--;
	return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
	switch (result) {
	case NVML_SUCCESS: return "Success";
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
	case NVML_ERROR_NOT_FOUND: return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
	case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case NVML_ERROR_TIMEOUT: return "Timeout";
	case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
	default: return "Unknown Error";
	}
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int size) { return text(out, size, STANDIN_VERSION); }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int size) { return text(out, size, "13." STANDIN_VERSION); }

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out)
{
	*out = CUDA_VERSION;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *out)
{
	*out = count;
	return uses ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *out) { return nvmlDeviceGetCount_v2(out); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *out)
{
	if (index >= count)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = &gpus[index];
	return alive(*out);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *out)
{
	return nvmlDeviceGetHandleByIndex_v2(index, out);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
	for (unsigned int index = 0; index < count; index++)
		if (!strcmp(gpus[index].uuid, uuid))
			return nvmlDeviceGetHandleByIndex_v2(index, out);
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *place, nvmlDevice_t *out)
{
	unsigned int domain = 0, bus = 0, slot = 0;

	sscanf(place, "%x:%x:%x", &domain, &bus, &slot);
	for (unsigned int index = 0; index < count; index++)
		if (gpus[index].domain == domain && gpus[index].bus == bus && gpus[index].slot == slot)
			return nvmlDeviceGetHandleByIndex_v2(index, out);
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t gpu, char *out, unsigned int size)
{
	REQUIRE(gpu);
	return text(out, size, gpu->name);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t gpu, char *out, unsigned int size)
{
	REQUIRE(gpu);
	return text(out, size, gpu->uuid);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t gpu, char *out, unsigned int size)
{
	REQUIRE(gpu);
	return text(out, size, "0000000000000");
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t gpu, nvmlPciInfo_t *out)
{
	REQUIRE(gpu);
	memset(out, 0, sizeof(*out));
	out->domain = gpu->domain;
	out->bus = gpu->bus;
	out->device = gpu->slot;
	out->pciDeviceId = gpu->device << 16 | 0x10de;
	out->pciSubSystemId = 0x16c110de;
	snprintf(out->busIdLegacy, sizeof(out->busIdLegacy), NVML_DEVICE_PCI_BUS_ID_LEGACY_FMT, gpu->domain, gpu->bus,
		 gpu->slot);
	snprintf(out->busId, sizeof(out->busId), NVML_DEVICE_PCI_BUS_ID_FMT, gpu->domain, gpu->bus, gpu->slot);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t gpu, nvmlPciInfoExt_t *out)
{
	REQUIRE(gpu);
	out->domain = gpu->domain;
	out->bus = gpu->bus;
	out->device = gpu->slot;
	out->pciDeviceId = gpu->device << 16 | 0x10de;
	out->pciSubSystemId = 0x16c110de;
	out->baseClass = 3;
	out->subClass = 2;
	snprintf(out->busId, sizeof(out->busId), NVML_DEVICE_PCI_BUS_ID_FMT, gpu->domain, gpu->bus, gpu->slot);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t gpu, nvmlMemory_t *out)
{
	REQUIRE(gpu);
	out->total = (unsigned long long)gpu->memory_mib << 20;
	out->used = 0;
	out->free = out->total;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t gpu, nvmlMemory_v2_t *out)
{
	REQUIRE(gpu);
	out->total = (unsigned long long)gpu->memory_mib << 20;
	out->reserved = out->used = 0;
	out->free = out->total;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t gpu, int *major, int *minor)
{
	REQUIRE(gpu);
	*major = gpu->capability / 10;
	*minor = gpu->capability % 10;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t gpu, unsigned int *current, unsigned int *pending)
{
	REQUIRE(gpu);
	*current = *pending = NVML_DEVICE_MIG_DISABLE;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t two, nvmlGpuTopologyLevel_t *out)
{
	REQUIRE(one);
	REQUIRE(two);
	*out = NVML_TOPOLOGY_NODE;
	return NVML_SUCCESS;
}

/* Functions that give one number of a GPU. */
#define NUMBER(name, type, value)                                \
	nvmlReturn_t name(nvmlDevice_t gpu, type *out)           \
	{                                                        \
		REQUIRE(gpu);                                    \
		*out = (value);                                  \
		return NVML_SUCCESS;                             \
	}
NUMBER(nvmlDeviceGetIndex, unsigned int, gpu - gpus)
NUMBER(nvmlDeviceGetMinorNumber, unsigned int, gpu->minor)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned int, 0)
NUMBER(nvmlDeviceIsMigDeviceHandle, unsigned int, 0)
NUMBER(nvmlDeviceGetBrand, nvmlBrandType_t, NVML_BRAND_NVIDIA)
NUMBER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
NUMBER(nvmlDeviceGetPerformanceState, nvmlPstates_t, NVML_PSTATE_0)
NUMBER(nvmlDeviceGetComputeMode, nvmlComputeMode_t, NVML_COMPUTEMODE_DEFAULT)
NUMBER(nvmlDeviceGetPowerUsage, unsigned int, 70000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned int, 700000)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned int, 700000)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, 16)
NUMBER(nvmlDeviceGetSupportedEventTypes, unsigned long long,
       nvmlEventTypeXidCriticalError | nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError)

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t gpu, nvmlDeviceArchitecture_t *out)
{
	REQUIRE(gpu);
	*out = gpu->capability >= 100 ? NVML_DEVICE_ARCH_BLACKWELL :
	       gpu->capability >= 90  ? NVML_DEVICE_ARCH_HOPPER :
	       gpu->capability == 89  ? NVML_DEVICE_ARCH_ADA :
	       gpu->capability >= 80  ? NVML_DEVICE_ARCH_AMPERE :
	       gpu->capability >= 75  ? NVML_DEVICE_ARCH_TURING :
	       gpu->capability >= 70  ? NVML_DEVICE_ARCH_VOLTA :
	       gpu->capability >= 60  ? NVML_DEVICE_ARCH_PASCAL :
					NVML_DEVICE_ARCH_KEPLER;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t gpu, nvmlTemperatureSensors_t sensor, unsigned int *out)
{
	(void)sensor;
	REQUIRE(gpu);
	*out = 34;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t gpu, nvmlUtilization_t *out)
{
	REQUIRE(gpu);
	out->gpu = out->memory = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t gpu, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
	REQUIRE(gpu);
	*current = *pending = NVML_FEATURE_ENABLED;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t gpu, nvmlMemoryErrorType_t kind, nvmlEccCounterType_t span,
					 unsigned long long *out)
{
	(void)kind;
	(void)span;
	REQUIRE(gpu);
	*out = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t gpu, unsigned int *corrected, unsigned int *uncorrected,
				       unsigned int *pending, unsigned int *failed)
{
	struct nvmlDevice_st now;
	bool lost;

	REQUIRE(gpu);
	*pending = look(gpu->place, &now, &lost) && now.remap;
	*corrected = *uncorrected = *failed = 0;
	return NVML_SUCCESS;
}

/* --- events: the control node gives a line "MINOR CODE" for each Xid --- */

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out)
{
	nvmlEventSet_t set = calloc(1, sizeof(*set));

	if (!set)
		return NVML_ERROR_MEMORY;
	set->control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	*out = set;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t gpu, unsigned long long types, nvmlEventSet_t set)
{
	REQUIRE(gpu);
	if (types & nvmlEventTypeXidCriticalError)
		set->watched[gpu - gpus] = true;
	return NVML_SUCCESS;
}

static unsigned long long milliseconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout)
{
	unsigned long long end = milliseconds() + timeout;
	struct pollfd control = { .fd = set->control, .events = POLLIN };
	unsigned int minor, code;
	char line[32];
	ssize_t length;

	for (;;) {
		long left = (long)(end - milliseconds());

		if (poll(&control, 1, left > 0 ? (int)left : 0) <= 0)
			return NVML_ERROR_TIMEOUT;
		length = read(set->control, line, sizeof(line) - 1);
		if (length <= 0)
			continue;
		line[length] = 0;
		if (sscanf(line, "%u %u", &minor, &code) != 2)
			continue;
		for (unsigned int index = 0; index < count; index++)
			if (set->watched[index] && gpus[index].minor == minor) {
				memset(out, 0, sizeof(*out));
				out->device = &gpus[index];
				out->eventType = nvmlEventTypeXidCriticalError;
				out->eventData = code;
				out->gpuInstanceId = out->computeInstanceId = 0xffffffff;
				return NVML_SUCCESS;
			}
	}
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	if (set->control >= 0)
		close(set->control);
	free(set);
	return NVML_SUCCESS;
}

/* --- what nvidia-smi asks for beyond the published interface --- */

enum { HANDLE_BY_INDEX = 81, RESET = 168, TO_BE_RESET = 197, FIRST_PROCESS_LIST = 213, LAST_PROCESS_LIST = 215, HOST_LINK_GENERATION = 230 };

static bool to_be_reset[MAX_GPUS];

/* nvidia-smi --gpu-reset names the GPUs one by one, then asks for it (seen by logging its calls, 550.163.01). */
static nvmlReturn_t reset(void)
{
	int control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);
	nvmlReturn_t answer = NVML_SUCCESS;
	char line[32];

	for (unsigned int index = 0; index < count; index++) {
		int length = snprintf(line, sizeof(line), "reset %u", gpus[index].minor);

		if (to_be_reset[index] && write(control, line, length) != length)
			answer = NVML_ERROR_NO_PERMISSION;
		to_be_reset[index] = false;
	}
	if (control >= 0)
		close(control);
	return answer;
}

/* The arguments of any other slot are not what they seem: some take one only, some a number. All succeed, and do nothing. */
static nvmlReturn_t internal(unsigned int slot, void *first, unsigned int *second)
{
	if (getenv("STANDIN_NVML_DEBUG"))
		fprintf(stderr, "slot %u(%p, %p)\n", slot, first, (void *)second);
	if (slot == HANDLE_BY_INDEX)
		return nvmlDeviceGetHandleByIndex_v2((unsigned int)(size_t)first, (nvmlDevice_t *)second);
	if (slot >= FIRST_PROCESS_LIST && slot <= LAST_PROCESS_LIST)
		*second = 0;
	if (slot == HOST_LINK_GENERATION)
		*second = 5;
	if (slot == TO_BE_RESET && in_list(first))
		to_be_reset[(nvmlDevice_t)first - gpus] = true;
	if (slot == RESET)
		return reset();
	return NVML_SUCCESS;
}

#define SLOT(h, l) static nvmlReturn_t slot_##h##_##l(void *a, unsigned int *b) { return internal(h * 16 + l, a, b); }
#define NAME(h, l) (void *)slot_##h##_##l,
#define ROW(M, h) \
	M(h, 0) M(h, 1) M(h, 2) M(h, 3) M(h, 4) M(h, 5) M(h, 6) M(h, 7) \
	M(h, 8) M(h, 9) M(h, 10) M(h, 11) M(h, 12) M(h, 13) M(h, 14) M(h, 15)
#define ALL(M) \
	ROW(M, 0) ROW(M, 1) ROW(M, 2) ROW(M, 3) ROW(M, 4) ROW(M, 5) ROW(M, 6) ROW(M, 7) \
	ROW(M, 8) ROW(M, 9) ROW(M, 10) ROW(M, 11) ROW(M, 12) ROW(M, 13) ROW(M, 14) ROW(M, 15) \
	ROW(M, 16) ROW(M, 17) ROW(M, 18) ROW(M, 19) ROW(M, 20) ROW(M, 21) ROW(M, 22) ROW(M, 23)
ALL(SLOT)
static void *table[] = { ALL(NAME) };

nvmlReturn_t nvmlInternalGetExportTable(const void **out, const void *id)
{
	(void)id;
	table[0] = (void *)sizeof(table);
	*out = table;
	return NVML_SUCCESS;
}
