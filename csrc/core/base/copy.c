/* Copies of captured bytes, with stores that bypass the caches.
 *
 * An ordinary copy reads each destination line into the cache before the line is overwritten. That
 * takes time and evicts the training's data. The C library bypasses the caches only for copies
 * about as large as the last-level cache. Measured on an AMD EPYC with 1 MB copies: memcpy
 * 10.5 GB/s, sfr__copy_bypassing_caches 19 GB/s. */
#include <string.h>

#include "base/base.h"

#if defined(__x86_64__)
#include <immintrin.h>

enum {
	STREAM_FROM = 512, /* bytes; shorter copies use memcpy */
	LINE = 64,         /* bytes of a cache line */
};

#define AVX2 __attribute__((target("avx2")))

/* Copies whole cache lines. `to` is aligned to a line. */
AVX2 static void stream_lines(char *to, const char *from, size_t nr_lines)
{
	for (; nr_lines != 0; nr_lines--, to += LINE, from += LINE) {
		__m256i low = _mm256_loadu_si256((const __m256i *)(const void *)from);
		__m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(from + 32));

		_mm256_stream_si256((__m256i *)(void *)to, low);
		_mm256_stream_si256((__m256i *)(void *)(to + 32), high);
	}
}

static bool have_avx2;

__attribute__((constructor)) static void copy_init(void)
{
	__builtin_cpu_init();
	have_avx2 = __builtin_cpu_supports("avx2") != 0;
}

void sfr__copy_bypassing_caches(void *dst, const void *src, size_t len)
{
	char *to = dst;
	const char *from = src;

	if (have_avx2 && len >= STREAM_FROM) {
		size_t head = (LINE - (uintptr_t)to % LINE) % LINE; /* bytes before a whole line */
		size_t nr_lines = (len - head) / LINE;
		size_t done = head + nr_lines * LINE;

		memcpy(to, from, head);
		stream_lines(to + head, from + head, nr_lines);
		to += done;
		from += done;
		len -= done;
	}
	memcpy(to, from, len);
}

void sfr__copy_fence(void)
{
	_mm_sfence();
}

#else

void sfr__copy_bypassing_caches(void *dst, const void *src, size_t len)
{
	memcpy(dst, src, len);
}

void sfr__copy_fence(void) {}

#endif
