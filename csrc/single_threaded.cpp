// libstdc++ asks glibc 2.32 and newer by this variable whether it may count references without
// atomics. Defined here as "no", the module also loads with an older glibc.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
