/* One unit of compilation of all parts of the fast path: torch's headers take nearly all of the compiler's time, and are
   read once. */

#include "tensors.cpp"

#include "attributes.cpp"
#include "call.cpp"
#include "candidates.cpp"
#include "entry.cpp"
#include "gradients.cpp"
#include "patch.cpp"
#include "replay.cpp"
