/* SPDX-License-Identifier: Apache-2.0
 * An NVTX injection library, as profilers have: appends the name of each range that is pushed to the file named by
 * NVTX_NAMES. NVTX loads it through NVTX_INJECTION64_PATH. The numbers are those of nvtxTypes.h. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { EXPORT_TABLE_CALLBACKS = 1, MODULE_CORE = 1, CALLBACK_RANGE_PUSH_A = 9 };

typedef void (*Callback)(void);
typedef struct {
  size_t struct_size;
  int (*get_function_table)(int module, Callback ***table, unsigned *n_callbacks);
} CallbackTables;

static FILE *names;

static int push(const char *name) {
  fprintf(names, "%s\n", name);
  fflush(names);
  return 0;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
  const CallbackTables *tables = export_table(EXPORT_TABLE_CALLBACKS);
  Callback **callbacks = NULL;
  unsigned n_callbacks = 0;
  names = fopen(getenv("NVTX_NAMES"), "a");
  if (!names || !tables || !tables->get_function_table(MODULE_CORE, &callbacks, &n_callbacks)) return 0;
  if (n_callbacks <= CALLBACK_RANGE_PUSH_A || !callbacks[CALLBACK_RANGE_PUSH_A]) return 0;
  *callbacks[CALLBACK_RANGE_PUSH_A] = (Callback)push;
  return 1;
}
