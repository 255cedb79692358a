/* The unit of compilation of the module _fast_path. It includes the other C++ files, since torch's headers take nearly
   all of the compiler's time and are then read only once. */

#include "tensors.cpp"

#include "addresses.cpp"
#include "attributes.cpp"
#include "call.cpp"
#include "candidates.cpp"
#include "entry.cpp"
#include "gradients.cpp"
#include "replay.cpp"
#include "results.cpp"
#include "tree.cpp"
