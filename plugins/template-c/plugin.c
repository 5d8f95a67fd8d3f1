/*
 * A plugin for neuropil that multiplies on the CPU: the starting point for a plugin of your own.
 *
 *   cc -std=c11 -shared -fPIC -I plugins/abi/include plugins/template-c/plugin.c -lm -o libmine.so
 *
 * Everything that the header asks for is here. To serve another unit, replace what is between "the unit" and "the
 * border": make_matrix puts a weight into the unit's own form, here plain floats, and multiply computes. What follows
 * after that checks what the host says before the unit sees it, and can stay.
 *
 * Nothing here changes after it was made, and there are no globals but constants. So many threads may call at once.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */

#include <math.h>
#include <neuropil_plugin.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GROUP 32u
#define MOST_PRODUCTS 4u
#define TEXT "template-c"

/* A field of a struct that the host wrote: 0 when its size does not cover the field. */
#define COVERS(type, p, field) ((p)->size >= offsetof(type, field) + sizeof((p)->field))
#define GET(type, p, field) (COVERS(type, p, field) ? (p)->field : 0)

/* ---- Answers ----------------------------------------------------------------------------------------------------- */

/* Bytes of a UTF-8 text that fit into `room` without cutting a character. */
static size_t whole(const char *text, size_t bytes, uint64_t room) {
    if (bytes <= room) return bytes;
    bytes = (size_t)room;
    while (bytes > 0 && ((unsigned char)text[bytes] & 0xC0u) == 0x80u) bytes -= 1;
    return bytes;
}

/* Fills the host's status and returns the code. */
static int32_t answer(np_status *status, int32_t code, const char *format, ...) {
    if (status == NULL) return code;
    char text[256];
    va_list values;
    va_start(values, format);
    int printed = vsnprintf(text, sizeof text, format, values);
    va_end(values);
    size_t bytes = printed < 0 ? 0 : (size_t)printed;
    if (bytes >= sizeof text) bytes = whole(text, sizeof text - 1, sizeof text - 2);
    bytes = whole(text, bytes, GET(np_status, status, text_capacity));
    char *room = GET(np_status, status, text);
    if (room == NULL) bytes = 0;
    if (bytes > 0) memcpy(room, text, bytes);
    if (COVERS(np_status, status, code)) status->code = code;
    if (COVERS(np_status, status, vendor_code)) status->vendor_code = 0;
    if (COVERS(np_status, status, text_bytes)) status->text_bytes = bytes;
    return code;
}

/* ---- The unit ---------------------------------------------------------------------------------------------------- */

/* A matrix in the form of the unit. */
typedef struct matrix {
    size_t rows, cols;
    float *values; /* [rows, cols] */
} matrix;

struct np_weight {
    int neurons; /* 0: one matrix in part[0]; 1: gate, up, down */
    matrix part[3];
};

struct np_device {
    int open;
};

/* A matrix of the host, after check_matrix. */
typedef struct source {
    uint32_t scheme;
    size_t rows, cols;
    const unsigned char *data, *scales, *mins;
    const uint32_t *outlier_columns;
    const unsigned char *outlier_data, *outlier_scales;
    size_t outlier_count;
} source;

static float f32_at(const unsigned char *bytes, size_t index) {
    float value;
    memcpy(&value, bytes + 4 * index, sizeof value);
    return value;
}

static float f16_at(const unsigned char *bytes, size_t index) {
    uint16_t half;
    memcpy(&half, bytes + 2 * index, sizeof half);
    float sign = (half & 0x8000u) != 0 ? -1.0f : 1.0f;
    int exponent = (half >> 10) & 31;
    int fraction = half & 1023;
    if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexpf((float)fraction, -24);
    return sign * ldexpf((float)(fraction + 1024), exponent - 25);
}

static int int8_at(const unsigned char *bytes, size_t index) {
    return bytes[index] < 128 ? bytes[index] : bytes[index] - 256;
}

static int uint4_at(const unsigned char *bytes, size_t index) {
    return index % 2 == 0 ? bytes[index / 2] & 15 : bytes[index / 2] >> 4;
}

static int int4_at(const unsigned char *bytes, size_t index) {
    int code = uint4_at(bytes, index);
    return code < 8 ? code : code - 16;
}

static float element(const source *from, size_t row, size_t col) {
    size_t index = row * from->cols + col;
    switch (from->scheme) {
    case NP_SCHEME_F32: return f32_at(from->data, index);
    case NP_SCHEME_F16: return f16_at(from->data, index);
    case NP_SCHEME_GROUP8: return f16_at(from->scales, index / GROUP) * (float)int8_at(from->data, index);
    case NP_SCHEME_GROUP4: return f16_at(from->scales, index / GROUP) * (float)int4_at(from->data, index);
    case NP_SCHEME_GROUP4M:
        return f16_at(from->scales, index / GROUP) * (float)uint4_at(from->data, index) +
               f16_at(from->mins, index / GROUP);
    case NP_SCHEME_CHANNEL8: return f32_at(from->scales, row) * (float)int8_at(from->data, index);
    default: return f32_at(from->scales, row) * (float)int4_at(from->data, index);
    }
}

/* Puts a matrix into the unit's form; 0 when there is no memory. */
static int make_matrix(const source *from, matrix *to) {
    to->values = malloc(from->rows * from->cols * sizeof(float));
    if (to->values == NULL) return 0;
    to->rows = from->rows;
    to->cols = from->cols;
    for (size_t row = 0; row < from->rows; row++) {
        float *out = to->values + row * from->cols;
        for (size_t col = 0; col < from->cols; col++) out[col] = element(from, row, col);
        for (size_t i = 0; i < from->outlier_count; i++) {
            int code = int8_at(from->outlier_data, row * from->outlier_count + i);
            out[from->outlier_columns[i]] += f32_at(from->outlier_scales, row) * (float)code;
        }
    }
    return 1;
}

/* One output: a row of a matrix times the inputs. */
static float multiply(const matrix *w, size_t row, const float *x) {
    const float *values = w->values + row * w->cols;
    double sum = 0.0;
    for (size_t col = 0; col < w->cols; col++) sum += (double)values[col] * (double)x[col];
    return (float)sum;
}

static float activate(uint32_t activation, float threshold, float g, float u) {
    float cut_g = g <= threshold ? 0.0f : g, cut_u = u <= threshold ? 0.0f : u;
    switch (activation) {
    case NP_ACT_SILU: return g / (1.0f + expf(-g)) * u;
    case NP_ACT_GELU: return 0.5f * g * (1.0f + tanhf(0.7978845608f * (g + 0.044715f * g * g * g))) * u;
    case NP_ACT_RELU: return cut_g * u;
    case NP_ACT_RELU2: return cut_g * cut_g * u;
    case NP_ACT_DRELU: return cut_g * cut_u;
    default: return g * u;
    }
}

static uint64_t now_ns(void) {
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0) return 0;
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- The border: sizes and shapes -------------------------------------------------------------------------------- */

/* a * b; 0 when there is no such size. */
static size_t times(size_t a, size_t b) {
    return a != 0 && b > (size_t)PTRDIFF_MAX / a ? 0 : a * b;
}

static int is_grouped(uint32_t scheme) {
    return scheme == NP_SCHEME_GROUP8 || scheme == NP_SCHEME_GROUP4 || scheme == NP_SCHEME_GROUP4M;
}

static int is_four_bits(uint32_t scheme) {
    return scheme == NP_SCHEME_GROUP4 || scheme == NP_SCHEME_GROUP4M || scheme == NP_SCHEME_CHANNEL4;
}

/* Why there can be no such matrix; NULL when there can. */
static const char *shape_fault(uint32_t scheme, uint64_t rows, uint64_t cols) {
    if (scheme < NP_SCHEME_F32 || scheme > NP_SCHEME_CHANNEL4) return "this plugin does not know the scheme";
    if (rows == 0 || cols == 0) return "a matrix has at least one row and one column";
    if (is_grouped(scheme) && cols % GROUP != 0) return "the columns are no multiple of 32";
    if (is_four_bits(scheme) && cols % 2 != 0) return "the columns of 4-bit codes are not even";
    if (rows > SIZE_MAX || cols > SIZE_MAX || times(times((size_t)rows, (size_t)cols), sizeof(float)) == 0)
        return "the matrix is too large";
    return NULL;
}

/* Checks a matrix of the host. */
static int32_t check_matrix(const np_matrix *m, source *to, np_status *status) {
    uint32_t scheme = GET(np_matrix, m, scheme);
    uint64_t rows = GET(np_matrix, m, rows), cols = GET(np_matrix, m, cols), group = GET(np_matrix, m, group);
    const char *fault = shape_fault(scheme, rows, cols);
    if (scheme < NP_SCHEME_F32 || scheme > NP_SCHEME_CHANNEL4) return answer(status, NP_UNSUPPORTED, "%s", fault);
    if (fault != NULL) return answer(status, NP_INVALID, "%s", fault);
    if (group != (is_grouped(scheme) ? GROUP : 0))
        return answer(status, NP_UNSUPPORTED, "groups of %llu columns: there are groups of 32, or 0 for none",
                      (unsigned long long)group);

    uint64_t codes = rows * cols; /* does not overflow, as shape_fault says; nor do the others */
    uint64_t data = is_four_bits(scheme) ? codes / 2 : codes;
    if (scheme == NP_SCHEME_F32) data = codes * 4;
    if (scheme == NP_SCHEME_F16) data = codes * 2;
    uint64_t scales = is_grouped(scheme) ? codes / GROUP * 2 : 0;
    if (scheme == NP_SCHEME_CHANNEL8 || scheme == NP_SCHEME_CHANNEL4) scales = rows * 4;
    uint64_t mins = scheme == NP_SCHEME_GROUP4M ? scales : 0;
    if (GET(np_matrix, m, data_bytes) != data || GET(np_matrix, m, scales_bytes) != scales ||
        GET(np_matrix, m, mins_bytes) != mins)
        return answer(status, NP_INVALID, "a matrix has %llu bytes of data, %llu of scales and %llu of minima",
                      (unsigned long long)data, (unsigned long long)scales, (unsigned long long)mins);

    uint64_t outliers = GET(np_matrix, m, outlier_count);
    *to = (source){scheme, (size_t)rows, (size_t)cols, GET(np_matrix, m, data), GET(np_matrix, m, scales),
                   GET(np_matrix, m, mins), GET(np_matrix, m, outlier_columns), GET(np_matrix, m, outlier_data),
                   GET(np_matrix, m, outlier_scales), (size_t)outliers};
    if (to->data == NULL || (scales > 0 && to->scales == NULL) || (mins > 0 && to->mins == NULL))
        return answer(status, NP_INVALID, "a matrix has bytes, but no pointer to them");
    if (outliers == 0) return NP_OK;
    if (scheme != NP_SCHEME_CHANNEL4 || outliers > cols || to->outlier_columns == NULL ||
        to->outlier_data == NULL || to->outlier_scales == NULL)
        return answer(status, NP_INVALID, "the outliers do not fit the matrix");
    for (size_t i = 0; i < to->outlier_count; i++) {
        uint32_t column = to->outlier_columns[i];
        if (column >= cols || (i > 0 && column <= to->outlier_columns[i - 1]))
            return answer(status, NP_INVALID, "the columns of outliers are ascending and below %llu",
                          (unsigned long long)cols);
    }
    return NP_OK;
}

/* The values of a buffer; NULL, with an answer, when it is not as large as the job needs. */
static float *values_of(const np_buffer *buffer, uint64_t tokens, size_t width, const char *name,
                        np_status *status) {
    size_t bytes = tokens > SIZE_MAX ? 0 : times(times((size_t)tokens, width), sizeof(float));
    float *data = buffer == NULL ? NULL : GET(np_buffer, buffer, data);
    if (bytes == 0 || data == NULL || (uintptr_t)data % sizeof(float) != 0 ||
        GET(np_buffer, buffer, bytes) < bytes) {
        answer(status, NP_INVALID, "%s does not have the %llu x %llu values that the job needs", name,
               (unsigned long long)tokens, (unsigned long long)width);
        return NULL;
    }
    return data;
}

/* Whether two buffers of a job, which may be NULL, have a value in common. */
static int overlap(const float *a, size_t a_values, const float *b, size_t b_values) {
    if (a == NULL || b == NULL) return 0;
    uintptr_t a_start = (uintptr_t)a, b_start = (uintptr_t)b;
    return a_start < b_start + b_values * sizeof(float) && b_start < a_start + a_values * sizeof(float);
}

static int32_t finish(uint64_t start, np_report *report, np_status *status) {
    if (report != NULL && COVERS(np_report, report, flags))
        report->flags = NP_REPORT_ZERO_COPY_INPUT | NP_REPORT_ZERO_COPY_OUTPUT;
    if (report != NULL && COVERS(np_report, report, device_ns)) report->device_ns = now_ns() - start;
    return answer(status, NP_OK, "%s", "");
}

/* ---- The border: the functions of the table ---------------------------------------------------------------------- */

/* There are no options; a plugin that has some looks for its keys here. */
static int32_t check_options(const np_options *options, np_status *status) {
    if (options == NULL || GET(np_options, options, count) == 0) return NP_OK;
    const np_option *const *items = GET(np_options, options, items);
    const np_option *item = items == NULL ? NULL : items[0];
    const char *key = item == NULL ? NULL : GET(np_option, item, key);
    if (key == NULL) return answer(status, NP_INVALID, "an option has no key");
    uint64_t bytes = GET(np_option, item, key_bytes);
    size_t shown = whole(key, bytes > 64 ? 65 : (size_t)bytes, 64);
    return answer(status, NP_INVALID, "there is no option %.*s: this plugin takes none", (int)shown, key);
}

static void describe(void *context, void (*found)(void *context, const np_device_info *info)) {
    static const char name[] = "one thread of the CPU", vendor[] = "neuropil", driver[] = TEXT " 1.0";
    np_device_info info = {
        .size = sizeof info, .kind = NP_KIND_CPU, .flags = NP_DEVICE_PARALLEL,
        .name = name, .name_bytes = sizeof name - 1,
        .vendor = vendor, .vendor_bytes = sizeof vendor - 1,
        .driver = driver, .driver_bytes = sizeof driver - 1,
    };
    found(context, &info);
}

static int32_t probe(const np_options *options, void *context,
                     void (*found)(void *context, const np_device_info *info), np_status *status) {
    int32_t code = check_options(options, status);
    if (code != NP_OK) return code;
    if (found == NULL) return answer(status, NP_INVALID, "there is no function to tell about units");
    describe(context, found);
    return answer(status, NP_OK, "%s", "");
}

static int32_t open_device(uint64_t index, const np_options *options, np_device **device, np_status *status) {
    int32_t code = check_options(options, status);
    if (code != NP_OK) return code;
    if (index != 0 || device == NULL) return answer(status, NP_INVALID, "there is one unit, of index 0");
    np_device *opened = calloc(1, sizeof *opened);
    if (opened == NULL) return answer(status, NP_OUT_OF_MEMORY, "there is no memory for a device");
    opened->open = 1;
    *device = opened;
    return answer(status, NP_OK, "%s", "");
}

static void close_device(np_device *device) {
    free(device);
}

static int32_t info(np_device *device, void *context, void (*found)(void *context, const np_device_info *info),
                    np_status *status) {
    if (device == NULL || found == NULL) return answer(status, NP_INVALID, "there is no device");
    describe(context, found);
    return answer(status, NP_OK, "%s", "");
}

static int32_t query(np_device *device, const np_query *q, np_support *support, np_status *status) {
    if (device == NULL || q == NULL) return answer(status, NP_INVALID, "there is no device or no question");
    uint32_t op = GET(np_query, q, op), scheme = GET(np_query, q, scheme), down = scheme;
    uint64_t rows = GET(np_query, q, rows), cols = GET(np_query, q, cols);
    const char *fault = shape_fault(scheme, rows, cols);
    if (fault == NULL && op == NP_OP_CLUSTER) {
        uint32_t stage = GET(np_query, q, stage), activation = GET(np_query, q, activation);
        down = GET(np_query, q, down_scheme);
        fault = shape_fault(down, cols, rows);
        if (stage < NP_STAGE_GATE || stage > NP_STAGE_FUSED) fault = "this plugin does not know the stage";
        if (activation < NP_ACT_SILU || activation > NP_ACT_LINEAR) fault = "this plugin does not know the activation";
    } else if (op != NP_OP_MATMUL && op != NP_OP_CLUSTER) {
        fault = "this plugin does not know the operation";
    }
    if (fault == NULL && (is_grouped(scheme) || is_grouped(down)) && GET(np_query, q, group) != GROUP)
        fault = "groups have 32 columns";
    if (fault == NULL && GET(np_query, q, tokens) == 0) fault = "a job has at least one token";
    if (fault != NULL) return answer(status, NP_UNSUPPORTED, "%s", fault);
    uint32_t outliers = scheme == NP_SCHEME_CHANNEL4 || down == NP_SCHEME_CHANNEL4 ? NP_SUPPORT_OUTLIERS : 0;
    if (support != NULL && COVERS(np_support, support, flags)) support->flags = NP_SUPPORT_NATIVE | outliers;
    return answer(status, NP_OK, "%s", "");
}

static void free_weight(np_device *device, np_weight *weight) {
    (void)device;
    if (weight == NULL) return;
    for (int i = 0; i < 3; i++) free(weight->part[i].values);
    free(weight);
}

static int32_t prepare(np_device *device, const np_weight_source *from, np_prepared *prepared, np_status *status) {
    if (device == NULL || from == NULL || prepared == NULL || !COVERS(np_prepared, prepared, weight))
        return answer(status, NP_INVALID, "there is no device, no source or no place for a weight");
    const np_matrix *given[3] = {GET(np_weight_source, from, gate), GET(np_weight_source, from, up),
                                 GET(np_weight_source, from, down)};
    const np_matrix *one = GET(np_weight_source, from, matrix);
    int neurons = one == NULL;
    int in_block = (given[0] != NULL) + (given[1] != NULL) + (given[2] != NULL);
    if (in_block != (neurons ? 3 : 0))
        return answer(status, NP_INVALID, "a weight is one matrix, or gate, up and down");
    if (!neurons) given[0] = one;

    source sources[3];
    int count = neurons ? 3 : 1;
    uint64_t bytes = 0;
    for (int i = 0; i < count; i++) {
        int32_t code = check_matrix(given[i], &sources[i], status);
        if (code != NP_OK) return code;
        bytes += (uint64_t)sources[i].rows * sources[i].cols * sizeof(float);
    }
    if (neurons && (sources[1].rows != sources[0].rows || sources[1].cols != sources[0].cols ||
                    sources[2].rows != sources[0].cols || sources[2].cols != sources[0].rows))
        return answer(status, NP_INVALID, "gate, up and down do not fit together");

    np_weight *weight = calloc(1, sizeof *weight);
    int made = weight != NULL;
    for (int i = 0; made && i < count; i++) made = make_matrix(&sources[i], &weight->part[i]);
    if (!made) {
        free_weight(device, weight);
        return answer(status, NP_OUT_OF_MEMORY, "there is no memory for %llu bytes of a weight",
                      (unsigned long long)bytes);
    }
    weight->neurons = neurons;
    prepared->weight = weight;
    if (COVERS(np_prepared, prepared, bytes)) prepared->bytes = bytes;
    return answer(status, NP_OK, "%s", "");
}

static int32_t matmul(np_device *device, const np_matmul_job *job, np_report *report, np_status *status) {
    uint64_t start = now_ns();
    if (device == NULL || job == NULL) return answer(status, NP_INVALID, "there is no device or no job");
    uint64_t tokens = GET(np_matmul_job, job, tokens), deadline = GET(np_matmul_job, job, deadline_ns);
    uint64_t count = GET(np_matmul_job, job, product_count);
    const np_product *const *products = GET(np_matmul_job, job, products);
    if (count < 1 || count > MOST_PRODUCTS || products == NULL)
        return answer(status, NP_INVALID, "a job has 1 to 4 products, not %llu", (unsigned long long)count);

    const matrix *w[MOST_PRODUCTS];
    float *y[MOST_PRODUCTS];
    for (size_t i = 0; i < count; i++) {
        const np_weight *weight = products[i] == NULL ? NULL : GET(np_product, products[i], weight);
        if (weight == NULL || weight->neurons || (i > 0 && weight->part[0].cols != w[0]->cols))
            return answer(status, NP_INVALID, "the products of a job have matrices of the same columns");
        w[i] = &weight->part[0];
        y[i] = values_of(GET(np_product, products[i], y), tokens, w[i]->rows, "y", status);
        if (y[i] == NULL) return NP_INVALID;
        for (size_t j = 0; j < i; j++)
            if (overlap(y[i], tokens * w[i]->rows, y[j], tokens * w[j]->rows))
                return answer(status, NP_INVALID, "the outputs of a job overlap");
    }
    const float *x = values_of(GET(np_matmul_job, job, x), tokens, w[0]->cols, "x", status);
    if (x == NULL) return NP_INVALID;
    for (size_t i = 0; i < count; i++)
        if (overlap(y[i], tokens * w[i]->rows, x, tokens * w[0]->cols))
            return answer(status, NP_INVALID, "an output of a job overlaps its input");

    for (size_t t = 0; t < tokens; t++) {
        if (deadline != 0 && now_ns() - start > deadline) return answer(status, NP_TIMEOUT, "the deadline passed");
        for (size_t i = 0; i < count; i++)
            for (size_t row = 0; row < w[i]->rows; row++)
                y[i][t * w[i]->rows + row] = multiply(w[i], row, x + t * w[i]->cols);
    }
    return finish(start, report, status);
}

static int32_t cluster(np_device *device, const np_cluster_job *job, np_report *report, np_status *status) {
    uint64_t start = now_ns();
    if (device == NULL || job == NULL) return answer(status, NP_INVALID, "there is no device or no job");
    const np_weight *weight = GET(np_cluster_job, job, weight);
    if (weight == NULL || !weight->neurons) return answer(status, NP_INVALID, "a cluster needs a block of neurons");
    uint32_t stage = GET(np_cluster_job, job, stage), activation = GET(np_cluster_job, job, activation);
    if (stage < NP_STAGE_GATE || stage > NP_STAGE_FUSED || activation < NP_ACT_SILU || activation > NP_ACT_LINEAR)
        return answer(status, NP_UNSUPPORTED, "this plugin does not know stage %u or activation %u", stage, activation);
    float threshold = GET(np_cluster_job, job, threshold);
    uint64_t tokens = GET(np_cluster_job, job, tokens), deadline = GET(np_cluster_job, job, deadline_ns);
    const matrix *gate = &weight->part[0], *up = &weight->part[1], *down = &weight->part[2];
    size_t neurons = gate->rows, width = gate->cols;

    int has_gate = stage == NP_STAGE_GATE || stage == NP_STAGE_GATE_UP || stage == NP_STAGE_FUSED;
    int has_down = stage == NP_STAGE_DOWN || stage == NP_STAGE_UP_DOWN || stage == NP_STAGE_FUSED;
    int has_up = stage != NP_STAGE_GATE && stage != NP_STAGE_DOWN;
    const np_buffer *given_x = GET(np_cluster_job, job, x), *given_y = GET(np_cluster_job, job, y);
    const np_buffer *given_hidden = GET(np_cluster_job, job, hidden);
    float *x = NULL, *hidden = NULL, *y = NULL;
    if (stage != NP_STAGE_DOWN && (x = values_of(given_x, tokens, width, "x", status)) == NULL) return NP_INVALID;
    if (stage != NP_STAGE_FUSED && (hidden = values_of(given_hidden, tokens, neurons, "hidden", status)) == NULL)
        return NP_INVALID;
    if (has_down && (y = values_of(given_y, tokens, width, "y", status)) == NULL) return NP_INVALID;
    if (overlap(x, tokens * width, hidden, tokens * neurons) || overlap(x, tokens * width, y, tokens * width) ||
        overlap(hidden, tokens * neurons, y, tokens * width))
        return answer(status, NP_INVALID, "the buffers of a job overlap");

    /* The hidden values of one token, for the stages that do not give them to the host. */
    float *inner = has_up && has_down ? malloc(neurons * sizeof(float)) : NULL;
    if (has_up && has_down && inner == NULL) return answer(status, NP_OUT_OF_MEMORY, "there is no memory for a job");
    for (size_t t = 0; t < tokens; t++) {
        if (deadline != 0 && now_ns() - start > deadline) {
            free(inner);
            return answer(status, NP_TIMEOUT, "the deadline passed");
        }
        float *left = hidden == NULL ? NULL : hidden + t * neurons; /* what an earlier stage left */
        float *out = inner != NULL ? inner : left;
        if (x != NULL)
            for (size_t n = 0; n < neurons; n++) {
                float g = has_gate ? multiply(gate, n, x + t * width) : left[n];
                out[n] = has_up ? activate(activation, threshold, g, multiply(up, n, x + t * width)) : g;
            }
        if (has_down)
            for (size_t row = 0; row < width; row++) y[t * width + row] = multiply(down, row, out);
    }
    free(inner);
    return finish(start, report, status);
}

static const np_plugin table = {
    .size = sizeof(np_plugin), .abi_major = NEUROPIL_PLUGIN_ABI_MAJOR, .abi_minor = NEUROPIL_PLUGIN_ABI_MINOR,
    .name = TEXT, .name_bytes = sizeof TEXT - 1, .version = "1.0", .version_bytes = 3,
    .probe = probe,
    .open = open_device,
    .close = close_device,
    .info = info,
    .query = query,
    .prepare = prepare,
    .free_weight = free_weight,
    .matmul = matmul,
    .cluster = cluster,
};

const np_plugin *neuropil_plugin_query(const np_host *host) {
    if (host == NULL || GET(np_host, host, abi_major) != NEUROPIL_PLUGIN_ABI_MAJOR) return NULL;
    return &table;
}
