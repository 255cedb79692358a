/* Attributes of Python objects that a fast replay reads and writes, and numbers that Python packs as bytes.

   Attribute::find notes where objects of one type keep an attribute if it is a slot; other attributes are read through
   Python's general mechanism. */

#include "fast_path.h"

#include <structmember.h>

using namespace pygraph;

Attributes pygraph::the;

void Attribute::find(PyTypeObject *asked) {
    bool is_slot = false;
    if (asked->tp_getattro == PyObject_GenericGetAttr && asked->tp_setattro == PyObject_GenericSetAttr) {
        Ref descriptor(PyObject_GetAttr(reinterpret_cast<PyObject *>(asked), name));
        if (!descriptor)
            PyErr_Clear(); // the type has no such attribute
        if (descriptor && Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type)) {
            const PyMemberDef *member = reinterpret_cast<PyMemberDescrObject *>(descriptor.get())->d_member;
            is_slot = member->type == T_OBJECT_EX;
            offset = is_slot ? member->offset : offset;
        }
    }
    PyTypeObject *&known = is_slot ? type : without;
    PyTypeObject *before = known;
    known = reinterpret_cast<PyTypeObject *>(Py_NewRef(reinterpret_cast<PyObject *>(asked)));
    Py_XDECREF(before);
}

bool pygraph::unpack(PyObject *bytes, std::vector<uint64_t> *numbers) {
    Packed<uint64_t> packed;
    if (!packed.take(bytes))
        return false;
    for (Py_ssize_t i = 0; i < packed.count; i++)
        numbers->push_back(packed[i]);
    return true;
}
