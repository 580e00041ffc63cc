// SPDX-License-Identifier: Apache-2.0
/* A stand-in for CUDA's driver library: it loads, and says that there is nothing to compute on. */
enum { NO_DEVICE = 100 }; /* CUDA_ERROR_NO_DEVICE of cuda.h */

int cuInit(unsigned int flags)
{
	(void)flags;
	return NO_DEVICE;
}

int cuDriverGetVersion(int *out)
{
	*out = 13000;
	return 0;
}
