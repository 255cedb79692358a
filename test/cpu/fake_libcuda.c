/* A driver library that answers as it was told: what native/graph_nodes.cpp calls, over tables that fake_native.py fills. */

#include <stddef.h>
#include <string.h>

typedef struct {
    void *function;
    unsigned int grid[3], block[3], shared;
    void **parameters;
    void **extra;
    void *kernel;
    void *context;
} Parameters;

static struct {
    void *handle;
    int type_code, type, code;
    Parameters parameters;
} nodes[512];

static struct {
    void *handle;
    int is_function, code;
    size_t count, offsets[64], sizes[64];
} kernels[512];

static size_t node_count, kernel_count;
static int listing;

void fake_reset(int code) {
    node_count = kernel_count = 0;
    listing = code;
}

void fake_node(void *handle, int type_code, int type, int code, void *function, void *kernel, void *parameters,
               void *extra) {
    nodes[node_count].handle = handle;
    nodes[node_count].type_code = type_code;
    nodes[node_count].type = type;
    nodes[node_count].code = code;
    memset(&nodes[node_count].parameters, 0x5a, sizeof(Parameters));
    nodes[node_count].parameters.function = function;
    nodes[node_count].parameters.kernel = kernel;
    nodes[node_count].parameters.parameters = parameters;
    nodes[node_count].parameters.extra = extra;
    node_count++;
}

void fake_kernel(void *handle, int is_function, int code) {
    kernels[kernel_count].handle = handle;
    kernels[kernel_count].is_function = is_function;
    kernels[kernel_count].code = code;
    kernels[kernel_count].count = 0;
    kernel_count++;
}

void fake_parameter(size_t offset, size_t nbytes) {
    size_t index = kernels[kernel_count - 1].count++;
    kernels[kernel_count - 1].offsets[index] = offset;
    kernels[kernel_count - 1].sizes[index] = nbytes;
}

int cuGraphGetNodes(void *graph, void **found, size_t *count) {
    (void)graph;
    if (found == NULL)
        *count = node_count;
    else
        for (size_t i = 0; i < *count; i++)
            found[i] = nodes[i].handle;
    return listing;
}

static size_t index_of(void *handle) {
    size_t i = 0;
    while (nodes[i].handle != handle)
        i++;
    return i;
}

int cuGraphNodeGetType(void *node, int *type) {
    *type = nodes[index_of(node)].type;
    return nodes[index_of(node)].type_code;
}

int cuGraphKernelNodeGetParams_v2(void *node, Parameters *parameters) {
    *parameters = nodes[index_of(node)].parameters;
    return nodes[index_of(node)].code;
}

static int info(void *handle, int is_function, size_t index, size_t *offset, size_t *nbytes) {
    for (size_t i = 0; i < kernel_count; i++)
        if (kernels[i].handle == handle && kernels[i].is_function == is_function) {
            if (index >= kernels[i].count)
                return kernels[i].code;
            *offset = kernels[i].offsets[index];
            *nbytes = kernels[i].sizes[index];
            return 0;
        }
    return 1; /* CUDA_ERROR_INVALID_VALUE */
}

int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *nbytes) {
    return info(function, 1, index, offset, nbytes);
}

int cuKernelGetParamInfo(void *kernel, size_t index, size_t *offset, size_t *nbytes) {
    return info(kernel, 0, index, offset, nbytes);
}

/* What was set, in order, and which call is refused. */
static struct {
    void *exec, *node;
    unsigned int shared;
} set[512];
static size_t set_count, refused_at;
static int refusal;

void fake_refuse(size_t at, int code) {
    set_count = 0;
    refused_at = at;
    refusal = code;
}

size_t fake_set(size_t index, void **exec, void **node, unsigned int *shared) {
    if (index < set_count) {
        *exec = set[index].exec;
        *node = set[index].node;
        *shared = set[index].shared;
    }
    return set_count;
}

int cuGraphExecKernelNodeSetParams_v2(void *exec, void *node, const Parameters *parameters) {
    if (refusal != 0 && set_count == refused_at)
        return refusal;
    set[set_count].exec = exec;
    set[set_count].node = node;
    set[set_count].shared = parameters->shared;
    set_count++;
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = &refusal;
    return 0;
}

/* The edges of the only graph: nodes and CUgraphEdgeData, which is two ports, a type and 5 bytes that must be 0. */
typedef struct {
    unsigned char from_port, to_port, type, reserved[5];
} EdgeData;

static void *edge_from[512], *edge_to[512];
static EdgeData edge_data[512];
static size_t edge_count;

int cuGraphGetEdges_v2(void *graph, void **from, void **to, EdgeData *data, size_t *count) {
    if (from != NULL) {
        memcpy(from, edge_from, *count * sizeof *from);
        memcpy(to, edge_to, *count * sizeof *to);
        memcpy(data, edge_data, *count * sizeof *data);
    }
    *count = edge_count;
    return graph == NULL;
}

int cuGraphAddDependencies_v2(void *graph, void *const *from, void *const *to, const EdgeData *data, size_t count) {
    memcpy(edge_from + edge_count, from, count * sizeof *from);
    memcpy(edge_to + edge_count, to, count * sizeof *to);
    memcpy(edge_data + edge_count, data, count * sizeof *data);
    edge_count += count;
    return graph == NULL;
}

/* Removes all edges, which must be these in their order. */
int cuGraphRemoveDependencies_v2(void *graph, void *const *from, void *const *to, const EdgeData *data, size_t count) {
    if (graph == NULL || count != edge_count || memcmp(from, edge_from, count * sizeof *from) != 0 ||
        memcmp(to, edge_to, count * sizeof *to) != 0 || memcmp(data, edge_data, count * sizeof *data) != 0)
        return 1; /* CUDA_ERROR_INVALID_VALUE */
    edge_count = 0;
    return 0;
}

enum { LEFT = 4096 };

/* Leaves a word on the stack, as calls of the driver do with addresses that they are given. It is given inverted, so
   that the word is nowhere else. */
__attribute__((noinline)) void fake_leave(size_t inverted) {
    volatile size_t block[LEFT];
    for (size_t i = 0; i < LEFT; i++)
        block[i] = ~inverted;
}

/* How often a block that was not filled has the word, as blocks of parameters are handed to launches. */
__attribute__((noinline)) size_t fake_left(size_t inverted) {
    volatile size_t block[LEFT];
    size_t count = 0;
    __asm__ volatile("" : : "r"(block) : "memory");
    for (size_t i = 0; i < LEFT; i++)
        count += ~block[i] == inverted;
    return count;
}
