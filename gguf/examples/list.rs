//! Lists the metadata and tensors of a GGUF file: `cargo run --example list -- FILE`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: list FILE");
        return ExitCode::from(2);
    };
    match list(path.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn list(path: &std::path::Path) -> skep_gguf::Result<()> {
    let start = std::time::Instant::now();
    let gguf = skep_gguf::open(path)?;
    let opened = start.elapsed();
    for (key, value) in gguf.metadata() {
        println!("{key} = {value}");
    }
    for tensor in gguf.tensors() {
        let shape: Vec<String> = tensor.shape().iter().map(u64::to_string).collect();
        println!(
            "{:<48} {:<8} {:<24} {:>12} bytes at {} in file {}",
            tensor.name(),
            tensor.ty(),
            shape.join(" x "),
            tensor.n_bytes(),
            tensor.offset(),
            tensor.part() + 1
        );
    }
    println!(
        "gguf version {}, {} files, {} bytes, {} keys, {} tensors; opened in {opened:.1?}",
        gguf.version(),
        gguf.parts(),
        gguf.file_bytes(),
        gguf.metadata().count(),
        gguf.tensors().len()
    );
    Ok(())
}
