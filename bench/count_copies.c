// A library for LD_PRELOAD that counts the bytes of memcpy and memmove calls with at least MIN_BYTES.
// The count is the first 8 bytes of the file COUNT_COPIES_DIR/PID. The file is mapped, so other
// processes can read the count while the process runs.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIN_BYTES 1024

typedef void *(*copy_function)(void *, const void *, size_t);
static copy_function real_memcpy, real_memmove;
static uint64_t *copied;

__attribute__((constructor)) static void begin(void) {
  real_memmove = (copy_function)dlsym(RTLD_NEXT, "memmove");
  real_memcpy = (copy_function)dlsym(RTLD_NEXT, "memcpy");
  const char *directory = getenv("COUNT_COPIES_DIR");
  char path[4096];
  if (directory == NULL || snprintf(path, sizeof path, "%s/%d", directory, getpid()) >= (int)sizeof path)
    return;
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0)
    return;
  if (ftruncate(file, sizeof *copied) == 0) {
    void *map = mmap(NULL, sizeof *copied, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED)
      copied = map;
  }
  close(file);
}

static void *copy(copy_function real, void *to, const void *from, size_t size) {
  if (size >= MIN_BYTES && copied != NULL)
    __atomic_fetch_add(copied, size, __ATOMIC_RELAXED);
  if (real != NULL)
    return real(to, from, size);
  // The loader copies before `begin` has run. Without volatile, the compiler would replace these
  // loops by a call of memmove.
  volatile char *t = to;
  const volatile char *f = from;
  if (t <= f)
    for (size_t i = 0; i < size; i++)
      t[i] = f[i];
  else
    for (size_t i = size; i > 0; i--)
      t[i - 1] = f[i - 1];
  return to;
}

void *memcpy(void *to, const void *from, size_t size) { return copy(real_memcpy, to, from, size); }
void *memmove(void *to, const void *from, size_t size) { return copy(real_memmove, to, from, size); }
void *__memcpy_chk(void *to, const void *from, size_t size, size_t room) {
  if (size > room)
    abort();
  return copy(real_memcpy, to, from, size);
}
void *__memmove_chk(void *to, const void *from, size_t size, size_t room) {
  if (size > room)
    abort();
  return copy(real_memmove, to, from, size);
}
