/* The functions of the CUDA runtime and of torch's c10 library that torch calls for fake tensors on a CUDA device. Loaded before
   torch, these versions replace the originals, which fail without a driver. There is one device, number 0. */

typedef int Error;
typedef signed char Index;

Error cudaGetDevice(int *device) { *device = 0; return 0; }
Error cudaSetDevice(int device) { return 0; }
Error cudaGetDeviceCount(int *count) { *count = 1; return 0; }
Error cudaGetLastError(void) { return 0; }
Error cudaPeekAtLastError(void) { return 0; }
Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }

/* c10::cuda::GetDevice, SetDevice, MaybeSetDevice, ExchangeDevice and MaybeExchangeDevice */
Error _ZN3c104cuda9GetDeviceEPa(Index *device) { *device = 0; return 0; }
Error _ZN3c104cuda9SetDeviceEab(Index device, _Bool force) { return 0; }
Error _ZN3c104cuda14MaybeSetDeviceEa(Index device) { return 0; }
Index _ZN3c104cuda14ExchangeDeviceEa(Index device) { return 0; }
Index _ZN3c104cuda19MaybeExchangeDeviceEa(Index device) { return 0; }
