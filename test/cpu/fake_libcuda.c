/* A driver library that keeps edges, and functions that leave data on the stack. */

#include <stddef.h>
#include <string.h>

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
