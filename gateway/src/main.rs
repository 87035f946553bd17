//! The `turnstile` binary.

/// Bodies of hundreds of kilobytes come and go: the system's allocator gives such buffers back to the kernel and gets them as
/// new pages, which costs more than what is done with them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    turnstile::cli::main()
}
