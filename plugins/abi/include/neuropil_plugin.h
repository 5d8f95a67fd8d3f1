/*
 * neuropil_plugin.h: how a compute unit joins neuropil.
 *
 * A plugin is a shared library that exports one function, neuropil_plugin_query. It needs this file and a C compiler,
 * and links to nothing of neuropil. The unit multiplies matrices; everything else of a model stays with the host.
 *
 *   host                                   plugin
 *   neuropil_plugin_query(host)  ------->  its table, or NULL: "I cannot serve this host"
 *   probe, open                  ------->  which units there are; a handle to one of them
 *   query                        ------->  can it do this product, and if not, why not
 *   prepare                      ------->  packs, uploads or compiles a weight; a handle to it
 *   matmul, cluster              ------->  the work
 *
 * Growth
 *   Every struct begins with its own size in bytes, as its writer knows it, and only ever grows at its end. A reader
 *   uses a field only when the size covers it, and takes a missing field as 0. An array is an array of pointers to
 *   structs, so its elements may grow too. Who fills a struct of the other side (np_status, np_report, ...) writes only
 *   fields that its size covers. The major version must be equal; the minor version only adds.
 *   A function pointer that is NULL, or lies past the size of np_plugin, is "not offered".
 *   Values that a reader does not know (an operation, a scheme, a stage) are answered with NP_UNSUPPORTED.
 *   Reserved fields are 0. Layouts are those of 64-bit little-endian machines.
 *
 * Ownership
 *   Nothing changes its owner, except the three kinds of handle that the plugin makes: np_device, np_weight and
 *   np_memory. The host gives each of them back exactly once, with close, free_weight and release_memory. Weights and
 *   memory go before their device.
 *   What the host passes lives until the call returns, unless a comment says otherwise. What the plugin passes to a
 *   callback lives until the callback returns. np_plugin, np_host and the library itself live until the process ends:
 *   a library is never unloaded.
 *   Texts are UTF-8 with a length and no 0 at the end. A text may be NULL when its length is 0.
 *
 * Threads
 *   The host calls from any of its threads, but makes one call at a time per device, and one call at a time of probe
 *   and open. A device with NP_DEVICE_PARALLEL takes calls from many threads at once. In both cases cancel may come at
 *   any time, and jobs that were submitted may still be under way. free_weight and release_memory come when no job
 *   that uses the handle is under way, and close comes when no job is under way at all.
 *   The host's functions (log, found, write, done) may be called from any thread. They return soon, and do not call
 *   back into the plugin.
 *
 * Errors
 *   Functions return a code (NP_OK, ...) and write the same code, with a text for people and the vendor's own number,
 *   to np_status. No exception, panic or signal may leave a plugin.
 */
#ifndef NEUROPIL_PLUGIN_H
#define NEUROPIL_PLUGIN_H

#include <stdint.h>

#define NEUROPIL_PLUGIN_ABI_MAJOR 1
#define NEUROPIL_PLUGIN_ABI_MINOR 0

#if defined(_WIN32)
#define NP_EXPORT __declspec(dllexport)
#else
#define NP_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A unit that was opened, a weight in the unit's own form, host memory that the unit can reach. The plugin's own. */
typedef struct np_device np_device;
typedef struct np_weight np_weight;
typedef struct np_memory np_memory;

/* ---- Results ---------------------------------------------------------------------------------------------------- */

#define NP_OK 0
#define NP_UNSUPPORTED 1    /* not offered; the text says what would be */
#define NP_INVALID 2        /* the arguments do not fit together; the host has a mistake */
#define NP_OUT_OF_MEMORY 3  /* the unit or the host has no more; a smaller request may do */
#define NP_LOST 4           /* the unit is gone; every later call on the device answers the same */
#define NP_TIMEOUT 5        /* the deadline passed; outputs are unspecified */
#define NP_CANCELLED 6      /* cancel was called; outputs are unspecified */
#define NP_INTERNAL 7       /* anything else that went wrong in the plugin or the driver */

/* What a call answers. Memory of the host. The plugin may leave text_bytes at 0. */
typedef struct np_status {
    uint32_t size;
    int32_t code;           /* NP_OK, ...: the value that the function returns */
    int64_t vendor_code;    /* the driver's own number; 0 when there is none */
    char *text;             /* room for text_capacity bytes */
    uint64_t text_capacity;
    uint64_t text_bytes;    /* bytes that were written, at most text_capacity; cut at a whole character */
} np_status;

/* How a job ran. Memory of the host, zeroed, apart from size. */
#define NP_REPORT_ZERO_COPY_INPUT 1  /* the unit read x where it lies */
#define NP_REPORT_ZERO_COPY_OUTPUT 2 /* the unit wrote every output where it lies */
typedef struct np_report {
    uint32_t size;
    uint32_t flags;         /* NP_REPORT_... */
    uint64_t device_ns;     /* time that the unit itself worked; 0 when unknown */
} np_report;

/* ---- The host ---------------------------------------------------------------------------------------------------- */

#define NP_LOG_ERROR 1
#define NP_LOG_WARNING 2
#define NP_LOG_INFO 3
#define NP_LOG_DEBUG 4

typedef struct np_host {
    uint32_t size;
    uint32_t abi_major;
    uint32_t abi_minor;
    uint32_t reserved;
    void *context;          /* the first argument of the host's functions */
    void (*log)(void *context, uint32_t level, const char *text, uint64_t text_bytes);
} np_host;

/* Settings that the user gave, such as library=/path/of/the/vendor. A plugin refuses a key that it does not know with
 * NP_INVALID and a text that lists those it knows. It reads no environment variables. */
typedef struct np_option {
    uint32_t size;
    uint32_t reserved;
    const char *key;
    uint64_t key_bytes;
    const char *value;
    uint64_t value_bytes;
} np_option;

typedef struct np_options {
    uint32_t size;
    uint32_t reserved;
    const np_option *const *items;
    uint64_t count;
} np_options;

/* ---- Units ------------------------------------------------------------------------------------------------------- */

#define NP_KIND_OTHER 0
#define NP_KIND_CPU 1
#define NP_KIND_GPU 2
#define NP_KIND_NPU 3

#define NP_DEVICE_PARALLEL 1 /* takes calls from many threads at once */

/* Kinds of memory, as bits. */
#define NP_MEMORY_HOST 1            /* any memory of the process, by pointer */
#define NP_MEMORY_DMA_BUF 2         /* a dma-buf, by file descriptor */
#define NP_MEMORY_HARDWARE_BUFFER 4 /* an AHardwareBuffer, by its pointer in native */
#define NP_MEMORY_RPCMEM 8          /* memory of Qualcomm's rpcmem, by pointer and file descriptor */

typedef struct np_device_info {
    uint32_t size;
    uint32_t kind;                  /* NP_KIND_... */
    const char *name;               /* for people: the product and what matters of it */
    uint64_t name_bytes;
    const char *vendor;
    uint64_t vendor_bytes;
    const char *driver;             /* versions of the driver and the vendor's libraries */
    uint64_t driver_bytes;
    const char *compatibility;      /* a saved plan is given back only under an equal text; empty: plans never */
    uint64_t compatibility_bytes;
    uint64_t memory_bytes;          /* for weights; 0 when unknown */
    uint32_t flags;                 /* NP_DEVICE_... */
    uint32_t memory_kinds;          /* NP_MEMORY_... that import_memory takes; 0: none */
    uint64_t memory_alignment;      /* of the start and the length of an imported region; a power of two, or 0 */
    const uint64_t *token_buckets;  /* ascending: the only token counts of jobs; none: any count */
    uint64_t token_bucket_count;
} np_device_info;

/* ---- Weights ----------------------------------------------------------------------------------------------------- */

/*
 * A matrix has rows (outputs) and cols (inputs) and lies row after row. Numbers are little-endian.
 *
 * scheme              data                             scales                mins           element (r, c)
 * NP_SCHEME_F32       f32 [rows, cols]                 -                     -              data
 * NP_SCHEME_F16       f16 [rows, cols]                 -                     -              data
 * NP_SCHEME_GROUP8    int8 [rows, cols]                f16 [rows, cols / g]  -              scale * code
 * NP_SCHEME_GROUP4    int4 [rows, cols]                f16 [rows, cols / g]  -              scale * code
 * NP_SCHEME_GROUP4M   uint4 [rows, cols]               f16 [rows, cols / g]  as scales      scale * code + min
 * NP_SCHEME_CHANNEL8  int8 [rows, cols]                f32 [rows]            -              scale * code
 * NP_SCHEME_CHANNEL4  int4 [rows, cols]                f32 [rows]            -              scale * code
 *
 * g is group; 32 in this version. cols is a multiple of g, and for 4-bit codes even. Two 4-bit codes lie in a byte, the
 * one of the even column in its low half; int4 is two's complement (-8 to 7), uint4 is 0 to 15. int8 codes of
 * NP_SCHEME_CHANNEL8 are -127 to 127. NP_SCHEME_GROUP8, GROUP4 and GROUP4M are Q8_0, Q4_0 and Q4_1 of GGUF with codes
 * and scales apart (a code of Q4_0 less 8).
 *
 * NP_SCHEME_CHANNEL4 may have outliers: columns that matter too much for 4 bits. Their codes in data are 0, and their
 * int8 codes stand in outlier_data [rows, outlier_count] with outlier_scales f32 [rows]. outlier_columns lists them,
 * ascending. Then y[r] = scale[r] * sum(code * x) + outlier_scale[r] * sum over outliers(code * x). A plugin that says
 * NP_SUPPORT_OUTLIERS to a query takes them; others get outlier_count = 0.
 */
#define NP_SCHEME_F32 1
#define NP_SCHEME_F16 2
#define NP_SCHEME_GROUP8 3
#define NP_SCHEME_GROUP4 4
#define NP_SCHEME_GROUP4M 5
#define NP_SCHEME_CHANNEL8 6
#define NP_SCHEME_CHANNEL4 7

typedef struct np_matrix {
    uint32_t size;
    uint32_t scheme;                 /* NP_SCHEME_... */
    uint64_t rows;
    uint64_t cols;
    uint64_t group;                  /* columns that share a scale; 0 where the scheme has no groups */
    const void *data;                /* aligned to 4 bytes, as are the others */
    uint64_t data_bytes;
    const void *scales;
    uint64_t scales_bytes;
    const void *mins;
    uint64_t mins_bytes;
    const uint32_t *outlier_columns;
    const void *outlier_data;
    const void *outlier_scales;
    uint64_t outlier_count;
} np_matrix;

#define NP_LIFETIME_CALL 0   /* the bytes live until prepare returns: copy what is needed later */
#define NP_LIFETIME_WEIGHT 1 /* the bytes live until free_weight: they may be used in place */

/* What prepare takes: one matrix for matmul; or for cluster, a block of neurons, where gate and up have one row per
 * neuron and down has one column per neuron. */
typedef struct np_weight_source {
    uint32_t size;
    uint32_t lifetime;               /* NP_LIFETIME_... */
    const char *name;                /* for logs; may be empty */
    uint64_t name_bytes;
    const np_matrix *matrix;         /* the matrix; NULL for a block */
    const np_matrix *gate;           /* all three for a block, otherwise NULL */
    const np_matrix *up;
    const np_matrix *down;
} np_weight_source;

typedef struct np_prepared {
    uint32_t size;
    uint32_t reserved;
    np_weight *weight;               /* never NULL after NP_OK */
    uint64_t bytes;                  /* memory that it takes */
} np_prepared;

/* A weight as save_plan wrote it, on a device with an equal compatibility text. The bytes may be damaged: check them.
 * The host takes any refusal as "prepare it anew". */
typedef struct np_plan {
    uint32_t size;
    uint32_t reserved;
    const void *data;
    uint64_t data_bytes;
} np_plan;

/* ---- Questions --------------------------------------------------------------------------------------------------- */

#define NP_OP_MATMUL 1
#define NP_OP_CLUSTER 2

/* hidden is [tokens, neurons], g = x * gate, u = x * up. A stage reads hidden when an earlier stage left it, and writes
 * it when a later one needs it. */
#define NP_STAGE_GATE 1    /* hidden = g */
#define NP_STAGE_UP 2      /* hidden = act(hidden, u) */
#define NP_STAGE_DOWN 3    /* y = hidden * down */
#define NP_STAGE_GATE_UP 4 /* hidden = act(g, u) */
#define NP_STAGE_UP_DOWN 5 /* y = act(hidden, u) * down; hidden stays */
#define NP_STAGE_FUSED 6   /* y = act(g, u) * down; no hidden */

/* act(g, u). cut(v) is 0 where v <= threshold, otherwise v. */
#define NP_ACT_SILU 1      /* g / (1 + exp(-g)) * u */
#define NP_ACT_GELU 2      /* the tanh form of gelu(g) * u */
#define NP_ACT_RELU 3      /* cut(g) * u */
#define NP_ACT_RELU2 4     /* cut(g) * cut(g) * u */
#define NP_ACT_DRELU 5     /* cut(g) * cut(u) */
#define NP_ACT_LINEAR 6    /* g * u */

typedef struct np_query {
    uint32_t size;
    uint32_t op;                     /* NP_OP_... */
    uint32_t scheme;                 /* of the matrix, or of gate and up */
    uint32_t down_scheme;            /* NP_OP_CLUSTER only, as the two below */
    uint32_t stage;
    uint32_t activation;
    uint64_t rows;                   /* outputs; neurons for NP_OP_CLUSTER */
    uint64_t cols;                   /* inputs; the width of the model for NP_OP_CLUSTER */
    uint64_t group;                  /* columns that share a scale; 0 where the scheme has no groups */
    uint64_t tokens;                 /* one of the buckets, if there are any */
} np_query;

#define NP_SUPPORT_NATIVE 1   /* the unit has a kernel for it */
#define NP_SUPPORT_EMULATED 2 /* it works by a detour that costs time */
#define NP_SUPPORT_OUTLIERS 4 /* and takes outlier columns */
typedef struct np_support {
    uint32_t size;
    uint32_t flags;                  /* NP_SUPPORT_...: of NATIVE and EMULATED exactly one */
} np_support;

/* ---- Work -------------------------------------------------------------------------------------------------------- */

/* A piece of host memory that the host has or made. offset counts from the start of the object behind fd or native. */
typedef struct np_region {
    uint32_t size;
    uint32_t kind;                   /* one bit of NP_MEMORY_... */
    void *host;                      /* where it is mapped; NULL for a kind without a pointer */
    void *native;                    /* the AHardwareBuffer; NULL otherwise */
    int32_t fd;                      /* -1 for a kind without one; stays the host's, duplicate it to keep it */
    uint32_t reserved;
    uint64_t offset;
    uint64_t bytes;
} np_region;

/* F32 values of a job, row after row without gaps, aligned to 4 bytes. The bytes can always be reached through data; a
 * copy is always right. If memory is not NULL, the same bytes start at memory_offset of it. */
typedef struct np_buffer {
    uint32_t size;
    uint32_t reserved;
    void *data;
    uint64_t bytes;
    np_memory *memory;
    uint64_t memory_offset;
} np_buffer;

typedef struct np_product {
    uint32_t size;
    uint32_t reserved;
    np_weight *weight;               /* of a matrix [rows, cols] */
    const np_buffer *y;              /* [tokens, rows]: overwritten */
} np_product;

/* y[t, r] = sum over c of w[r, c] * x[t, c], for one input and 1 to 4 weights that share it (Q, K and V of a layer). */
typedef struct np_matmul_job {
    uint32_t size;
    uint32_t reserved;
    uint64_t tokens;                 /* one of the buckets, if there are any */
    uint64_t deadline_ns;            /* from the call on; 0: none. Past it the plugin answers NP_TIMEOUT, if it can */
    const np_buffer *x;              /* [tokens, cols] */
    const np_product *const *products;
    uint64_t product_count;
} np_matmul_job;

/* The feed-forward of a prepared block of neurons. */
typedef struct np_cluster_job {
    uint32_t size;
    uint32_t stage;                  /* NP_STAGE_... */
    uint32_t activation;             /* NP_ACT_... */
    float threshold;                 /* 0 for the plain functions */
    uint64_t tokens;
    uint64_t deadline_ns;
    np_weight *weight;
    const np_buffer *x;              /* [tokens, width]; NULL for NP_STAGE_DOWN */
    const np_buffer *hidden;         /* [tokens, neurons]; NULL for NP_STAGE_FUSED */
    const np_buffer *y;              /* [tokens, width]: overwritten; NULL for a stage without a sum */
} np_cluster_job;

/* Who is told that a submitted job has ended, whatever its end: exactly once, from any thread, possibly before submit
 * returned. Outputs are not touched after that. */
typedef struct np_completion {
    uint32_t size;
    uint32_t reserved;
    void *context;
    void (*done)(void *context, const np_status *status, const np_report *report);
} np_completion;

/* ---- The plugin -------------------------------------------------------------------------------------------------- */

/*
 * All functions but the first two take a device. status and report are never NULL. Functions without a result cannot
 * fail. The functions up to matmul are required; the others may be NULL.
 */
typedef struct np_plugin {
    uint32_t size;
    uint32_t abi_major;
    uint32_t abi_minor;
    uint32_t reserved;
    const char *name;
    uint64_t name_bytes;
    const char *version;             /* of the plugin */
    uint64_t version_bytes;

    /* Calls found once per unit that is there, in the order of their index. No unit is NP_OK too. Cheap: it opens none. */
    int32_t (*probe)(const np_options *options, void *context,
                     void (*found)(void *context, const np_device_info *info), np_status *status);
    int32_t (*open)(uint64_t index, const np_options *options, np_device **device, np_status *status);
    void (*close)(np_device *device);
    /* Calls found once. What it says of an open device may be better than probe, and does not change. */
    int32_t (*info)(np_device *device, void *context,
                    void (*found)(void *context, const np_device_info *info), np_status *status);
    /* NP_OK, or NP_UNSUPPORTED with the reason. Pure: the same answer for the life of the device. */
    int32_t (*query)(np_device *device, const np_query *query, np_support *support, np_status *status);
    int32_t (*prepare)(np_device *device, const np_weight_source *source, np_prepared *prepared, np_status *status);
    void (*free_weight)(np_device *device, np_weight *weight);
    /* Returns when the outputs are there. */
    int32_t (*matmul)(np_device *device, const np_matmul_job *job, np_report *report, np_status *status);

    /* As matmul, for blocks of neurons. */
    int32_t (*cluster)(np_device *device, const np_cluster_job *job, np_report *report, np_status *status);
    /* Return soon. After NP_OK completion is told once, and until then the job and everything that it names, completion
     * too, stay alive. After another code it is never told. */
    int32_t (*submit_matmul)(np_device *device, const np_matmul_job *job, const np_completion *completion,
                             np_status *status);
    int32_t (*submit_cluster)(np_device *device, const np_cluster_job *job, const np_completion *completion,
                              np_status *status);
    /* Asks all jobs under way to end soon with NP_CANCELLED. Comes from any thread, returns at once. */
    void (*cancel)(np_device *device);
    /* The region stays alive and in its place until release_memory. */
    int32_t (*import_memory)(np_device *device, const np_region *region, np_memory **memory, np_status *status);
    void (*release_memory)(np_device *device, np_memory *memory);
    /* Writes a prepared weight, in pieces; write answers 0 to go on, anything else to stop with NP_CANCELLED. */
    int32_t (*save_plan)(np_device *device, np_weight *weight, void *context,
                         int32_t (*write)(void *context, const void *data, uint64_t bytes), np_status *status);
    int32_t (*load_plan)(np_device *device, const np_plan *plan, np_prepared *prepared, np_status *status);
} np_plugin;

/* The one function that a plugin exports. Cheap and without effect: it starts no driver. It compares the versions, may
 * keep host, and returns a table that lives until the process ends, or NULL. It may be called more than once. */
NP_EXPORT const np_plugin *neuropil_plugin_query(const np_host *host);

#ifdef __cplusplus
}
#endif
#endif
