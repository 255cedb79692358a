/* CompiledFxGraph.__call__ with a fast replay first: pygraph_trees.native._fast_path.Call.

   Call(upstream=, profiler=, debug=, conform_inputs=) is a method of the class. It returns the result of the attribute
   `fast_call` of the object's current_callable. If that is missing or returns None, or while torch profiles or records
   graphs for debugging, it returns the result of the function `upstream`. Once a call had hooks on saved tensors,
   `conform_inputs` gets object and inputs first; and before `upstream`, if a tangent may be a negated or conjugate view:
   code outside of recordings reads its memory as it is. */

#include "fast_path.h"

#include <ATen/SavedTensorHooks.h>

using namespace pygraph;

namespace {

struct Call {
    vectorcallfunc vectorcall = nullptr;
    PyObject *upstream = nullptr, *profiler = nullptr, *debug = nullptr, *conform_inputs = nullptr;

    void take(const py::dict &given);
    void each(const auto &function) {
        for (PyObject **held : {&upstream, &profiler, &debug, &conform_inputs})
            function(*held);
    }
};

/* Whether hooks on saved tensors are set in this thread, or were set at an earlier call. */
bool hooks_were_set() {
    static bool were_set = false; // protected by the GIL
    if (!were_set)
        were_set = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
    return were_set;
}

bool is_any_lazy(PyObject *inputs) {
    if (!PyList_CheckExact(inputs))
        return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); i++)
        if (PyObject *input = PyList_GET_ITEM(inputs, i); is_tensor(input) && is_lazy(THPVariable_Unpack(input)))
            return true;
    return false;
}

/* Whether a variable of a module is true; -1 with an exception. */
int is_set(PyObject *module, PyObject *variable) {
    PyObject *value = PyDict_GetItemWithError(module, variable);
    if (value == nullptr)
        return PyErr_Occurred() ? -1 : 0;
    return PyObject_IsTrue(value);
}

/* The callable that replays on the fast path for an object; NULL if there is none, or with an exception. */
Ref fast_call_of(const Call *call, PyObject *object) {
    Ref callable(PyObject_GetAttr(object, names.current_callable));
    if (!callable || !PyFunction_Check(callable.get()))
        return Ref();
    PyObject *attributes = reinterpret_cast<PyFunctionObject *>(callable.get())->func_dict;
    PyObject *found = attributes == nullptr ? nullptr
                                            : PyDict_GetItemWithError(attributes, names.fast_call);
    if (found == nullptr || found == Py_None || is_set(call->profiler, names._is_profiler_enabled) != 0 ||
        is_set(call->debug, names.RECORD_GRAPH_EXECUTION) != 0)
        return Ref();
    return Ref::dup(found);
}

PyObject *call_vectorcall(PyObject *self, PyObject *const *arguments, size_t flags, PyObject *keywords) {
    const Call *call = &fields_of<Call>(self);
    if (PyVectorcall_NARGS(flags) == 2 && keywords == nullptr) {
        const auto conforms = [&] {
            return bool(Ref(PyObject_CallFunctionObjArgs(call->conform_inputs, arguments[0], arguments[1], nullptr)));
        };
        const bool is_checked = hooks_were_set();
        if (is_checked && !conforms())
            return nullptr;
        Ref fast_call = fast_call_of(call, arguments[0]);
        if (!fast_call && PyErr_Occurred())
            return nullptr;
        Ref outputs = fast_call ? Ref(PyObject_CallOneArg(fast_call.get(), arguments[1])) : Ref();
        if (fast_call && outputs.get() != Py_None)
            return outputs.release();
        if (!is_checked && is_any_lazy(arguments[1]) && !conforms())
            return nullptr;
    }
    return PyObject_Vectorcall(call->upstream, arguments, static_cast<size_t>(PyVectorcall_NARGS(flags)), keywords);
}

void Call::take(const py::dict &given) {
    vectorcall = call_vectorcall;
    upstream = reference(given["upstream"]);
    profiler = reference(given["profiler"].cast<py::dict>());
    debug = reference(given["debug"].cast<py::dict>());
    conform_inputs = reference(given["conform_inputs"]);
}

/* Binds an object as functions do. */
PyObject *call_bind(PyObject *self, PyObject *object, PyObject *) {
    return object == nullptr || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

PyMemberDef call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, FIELD(Call, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, FIELD(Call, upstream), READONLY, "What is called if no fast replay is possible."},
    {nullptr, 0, 0, 0, nullptr},
};

} // namespace

void pygraph::add_call(py::module_ &module) {
    add_class<Call>(module, "pygraph_trees.native._fast_path.Call",
                    Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
                    {{Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
                     {Py_tp_descr_get, reinterpret_cast<void *>(call_bind)},
                     {Py_tp_members, call_members}});
}
