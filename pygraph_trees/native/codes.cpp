/* Which code a call runs. A profile function in Python would not do: Dynamo does not see what a finalizer calls inside of
   it. */

namespace {

thread_local PyObject *noted = nullptr; // a dictionary, while this thread notes codes

int note_code(PyObject *, PyFrameObject *frame, int what, PyObject *) {
    if (what != PyTrace_CALL || noted == nullptr)
        return 0;
    Ref code(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame))), key(PyLong_FromVoidPtr(code.get()));
    return key ? PyDict_SetItem(noted, key.get(), code.get()) : -1;
}

bool note_codes(const std::optional<py::dict> &codes) {
    const Py_tracefunc profiler = PyThreadState_Get()->c_profilefunc;
    if (codes && profiler != nullptr)
        return false;
    noted = codes ? codes->ptr() : nullptr;
    if (codes || profiler == note_code)
        PyEval_SetProfile(codes ? note_code : nullptr, nullptr);
    return true;
}

void add_codes(py::module_ &module) {
    module.def("note_codes", note_codes,
               "Puts the code of each Python function that this thread calls into a dictionary, by identity, until it "
               "is given None. False if there is another profiler.");
}

} // namespace
