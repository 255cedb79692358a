/* Memory of a function's outputs outside of the graph pool, which replays write again while it is dead. */

#pragma once

#include "addresses.h"

#include <c10/core/Stream.h>

namespace pygraph {

/* Sizes, strides, offset in elements, and type of a tensor in a storage. */
struct Strided {
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
    caffe2::TypeMeta dtype;
};

struct OwnMemory {
    PyObject_HEAD struct Block {
        size_t nbytes = 0;
        Strided layout;     // of its tensor, which begins where the storage does
        bool lends = false; // whether the tensor itself is returned to code that only accumulates gradients
        PyObject *base =
            nullptr; // the tensor, which nothing else references while the block is free; NULL without memory
        Known known;              // of the tensor, for prefetching
        const void *address = nullptr;
        c10::DeleterFnPtr deleter = nullptr;
        c10::Stream stream{c10::Stream::DEFAULT, c10::Device(c10::kCPU)}; // on which it was allocated
        c10::weak_intrusive_ptr<c10::StorageImpl> last{
            c10::intrusive_ptr<c10::StorageImpl>()}; // of a call that gave it away
        bool holds = true;                           // whether the memory is kept for the next call
        bool is_used = false;                        // whether another stream may use it: see record_stream
        bool is_new = false;                         // whether no call that was launched has used the memory
        uint8_t alive = 0;                           // consecutive calls at which the program still had the last output
        uint8_t dead = 0; // consecutive calls at which it no longer had it, although the memory was not kept
    };
    struct State {
        c10::Device device{c10::kCPU};
        std::vector<Block> blocks;
        std::vector<Ref> dropped;                             // references to release once the call has no turn
        PyObject *allocated = nullptr, *given_away = nullptr; // Counter objects: blocks so far
        unsigned long long used = 0;                          // the number of its latest call, among all calls
        bool may_hold = true;
        bool is_taking = false;  // a finalizer may run meanwhile

        /* Makes every block free for this call, on the current stream. False without memory; then `error` says why.
           Blocks that the program still uses are given to it, and others allocated. */
        bool take(std::string *error);
        /* Whether a block is still free, after other code may have run. */
        bool is_free(size_t number) const;
        /* Ends a call that was launched. */
        void launched();
        /* Drops all memory; what the program uses stays alive. */
        void release();

        PyObject *item(uint64_t number) const { return number < blocks.size() ? blocks[number].base : nullptr; }

      private:
        bool take_all(std::string *error);
        bool allocate(Block *block, const c10::Stream &stream, std::string *error);
        void give_away(Block *block);
    } *state;
};

/* The state of an OwnMemory; NULL for any other object, and for NULL. */
OwnMemory::State *own_memory_in(PyObject *object);

/* A new tensor in the storage of another one; NULL with an exception. */
PyObject *alias(PyObject *base, const Strided &layout);

/* Takes sizes, strides, offset and dtype; false with an exception. */
bool take_strided(PyObject *sizes, PyObject *strides, long long offset, PyObject *dtype, Strided *taken);

/* Notes that another stream uses a tensor's memory: a block there is not used again. */
void note_stream(const at::Tensor &tensor);

extern PyType_Spec own_memory_spec;

} // namespace pygraph
