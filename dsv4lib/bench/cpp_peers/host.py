"""C++ that stands in for the CUDA runtime where nvcc's host code runs in the emulator.

It is compiled as plain C++ (nvcc's own headers for .cu files define some of these functions for the device) and linked
in place of libcudart: launches and tensor maps go to the emulator (`library`), by the functions that `dsv4_connect` is
given. What is not here is an undefined symbol when the library is loaded.
"""

SOURCE = """
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {
using Launch = int (*)(const cudaLaunchConfig_t*, const char*, void**);
struct Pushed { dim3 grid, block; size_t smem; void* stream; };

Launch launch = nullptr;
void *tiled = nullptr, *im2col = nullptr;
int multiprocessors = 1;
cudaError_t last = cudaSuccess;

std::map<const void*, std::string>& kernels() { static std::map<const void*, std::string> all; return all; }
std::vector<Pushed>& pushed() { static std::vector<Pushed> all; return all; }

cudaError_t run(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    const auto found = kernels().find(function);
    last = found == kernels().end() ? cudaErrorInvalidDeviceFunction
         : launch == nullptr        ? cudaErrorNoDevice
                                    : static_cast<cudaError_t>(launch(config, found->second.c_str(), arguments));
    return last;
}
}  // namespace

extern "C" {
void dsv4_connect(Launch run_kernel, void* encode_tiled, void* encode_im2col, int sm_count) {
    launch = run_kernel, tiled = encode_tiled, im2col = encode_im2col, multiprocessors = sm_count, last = cudaSuccess;
}

// What nvcc's own code calls: a file registers its kernels when it is loaded, <<<>>> pushes and pops a configuration.
void** __cudaRegisterFatBinary(void*) { static void* handle = nullptr; return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    kernels()[host] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}  // keeps its first value
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, CUstream_st* stream) {
    pushed().push_back({grid, block, smem, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* smem, void* stream) {
    const Pushed one = pushed().back();
    pushed().pop_back();
    *grid = one.grid, *block = one.block, *smem = one.smem;
    std::memcpy(stream, &one.stream, sizeof(void*));
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
    return run(config, function, arguments);
}
cudaError_t cudaLaunchKernel(
    const void* function, dim3 grid, dim3 block, void** arguments, size_t smem, cudaStream_t stream) {
    const cudaLaunchConfig_t config = {grid, block, smem, stream, nullptr, 0};
    return run(&config, function, arguments);
}
cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t smem, cudaStream_t stream) {
    return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, smem, stream);
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { const cudaError_t error = last; last = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError() { return last; }
cudaError_t cudaDeviceSynchronize() { return last; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return last; }
const char* cudaGetErrorString(cudaError_t) { return "the emulator stopped the launch"; }
const char* cudaGetErrorName(cudaError_t) { return "emulator"; }
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDA_VERSION; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = multiprocessors;
    return attribute == cudaDevAttrMultiProcessorCount ? cudaSuccess : cudaErrorNotSupported;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
    *function = std::strcmp(name, "cuTensorMapEncodeTiled") == 0    ? tiled
              : std::strcmp(name, "cuTensorMapEncodeIm2col") == 0 ? im2col
                                                                  : nullptr;
    if (result != nullptr) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}
}
"""
