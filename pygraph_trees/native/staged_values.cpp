/* Writes the CPU inputs of a call to the memory from which kernel nodes take their bytes. */

#include "staged_values.h"
#include "fast_path.h"

#include <ATen/Context.h>

using namespace pygraph;

bool StagedValues::take(PyObject *triples) {
    Items items;
    if (!items.take(triples))
        return false;
    for (Py_ssize_t i = 0; i < items.count; i++) {
        unsigned long long index;
        PyObject *object;
        int may_be_late;
        if (!is_tuple(items.at[i]) || !PyArg_ParseTuple(items.at[i], "KOp", &index, &object, &may_be_late))
            return false;
        const at::Tensor *memory = tensor_of(object);
        if (memory == nullptr)
            return false;
        values.push_back({index, *memory, may_be_late != 0});
    }
    return true;
}

/* Whether copying the bytes of a tensor to dense memory copies the tensor. */
static bool is_like(const at::Tensor &tensor, const at::Tensor &memory) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
           tensor.dtype() == memory.dtype() && tensor.sizes() == memory.sizes() && tensor.strides() == memory.strides() &&
           !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor();
}

bool StagedValues::write(const Inputs &inputs) const {
    for (const Value &value : values) {
        PyObject *object = inputs.at(value.index);
        if (object == nullptr || !is_tensor(object))
            return false;
        const at::Tensor &tensor = THPVariable_Unpack(object);
        if (!is_like(tensor, value.memory))
            return false;
        const void *bytes = tensor.const_data_ptr();
        if (value.may_be_late && at::globalContext().isPinnedPtr(bytes))
            return false;
        std::memcpy(value.memory.data_ptr(), bytes, value.memory.nbytes());
    }
    return true;
}
