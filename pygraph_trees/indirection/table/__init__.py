"""The route by table: slots that hold addresses, and variants of Triton kernels that load pointers from them."""
