// libcuda.so.1 for tests: finds what cuda_driver.py put in, and nothing else.
#include <string.h>

static struct {
  char name[64];
  void *function;
} known[64];
static int count;

void stub_set(const char *name, void *function) {
  strncpy(known[count].name, name, 63);
  known[count++].function = function;
}

int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);

static int find(const char *name, void **function) {
  *function = 0;
  for (int i = 0; i < count; ++i)
    if (!strcmp(known[i].name, name)) *function = known[i].function;
  if (!strncmp(name, "cuGetProcAddress", 16)) *function = (void *)cuGetProcAddress_v2;
  return *function ? 0 : 500;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                        int *status) {
  int error = find(name, function);
  if (status) *status = error ? 1 : 0;
  return error;
}

int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
  return find(name, function);
}
