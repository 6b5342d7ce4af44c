//! NVIDIA's compiler as a library, loaded at run time.

use crate::{Error, ErrorKind, Result};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use libloading::Library;
use std::ffi::CString;
use std::sync::OnceLock;

/// Options beside the architecture.
pub(super) const OPTIONS: [&str; 1] = ["--std=c++17"];

/// Names of the library, newest first.
#[cfg(not(windows))]
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
#[cfg(windows)]
const NAMES: [&str; 2] = ["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];

type Program = *mut c_void;

/// The functions that are used, found once.
struct Table {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
}

/// The library, or why there is none.
fn table() -> core::result::Result<&'static Table, &'static str> {
    static TABLE: OnceLock<core::result::Result<Table, String>> = OnceLock::new();
    TABLE.get_or_init(load).as_ref().map_err(String::as_str)
}

fn load() -> core::result::Result<Table, String> {
    let mut reasons = Vec::new();
    for name in NAMES {
        // SAFETY: NVIDIA's library has no constructors that ask for anything.
        match unsafe { Library::new(name) } {
            // The functions are called until the end of the process, so the library stays.
            Ok(library) => {
                return find(Box::leak(Box::new(library))).map_err(|error| format!("{name}: {error}"));
            }
            Err(_) => reasons.push(name),
        }
    }
    Err(format!("none of {} can be loaded", reasons.join(", ")))
}

fn find(library: &'static Library) -> core::result::Result<Table, libloading::Error> {
    macro_rules! get {
        ($name:literal) => {
            // SAFETY: the types are those of nvrtc.h.
            *unsafe { library.get(concat!($name, "\0").as_bytes()) }?
        };
    }
    Ok(Table {
        version: get!("nvrtcVersion"),
        error_string: get!("nvrtcGetErrorString"),
        create: get!("nvrtcCreateProgram"),
        compile: get!("nvrtcCompileProgram"),
        log_size: get!("nvrtcGetProgramLogSize"),
        log: get!("nvrtcGetProgramLog"),
        cubin_size: get!("nvrtcGetCUBINSize"),
        cubin: get!("nvrtcGetCUBIN"),
        destroy: get!("nvrtcDestroyProgram"),
    })
}

/// The version of the library, for keys of what it compiles.
pub(super) fn version() -> String {
    let Ok(table) = table() else { return "no nvrtc".to_owned() };
    let (mut major, mut minor) = (0, 0);
    // SAFETY: pointers are to locals.
    unsafe { (table.version)(&mut major, &mut minor) };
    format!("nvrtc {major}.{minor}")
}

/// Compiles a unit of the kernel language for an architecture such as `sm_90`, without any device.
///
/// # Errors
/// [`ErrorKind::NoDriver`] if the library (NVRTC) is not there, [`ErrorKind::Compile`] with its words.
pub fn compile(name: &str, unit: &str, target: &str) -> Result<Vec<u8>> {
    let table = table()
        .map_err(|reason| Error::new(ErrorKind::NoDriver { driver: "nvrtc", detail: reason.to_owned() }))?;
    let failed = |detail: String| {
        Error::new(ErrorKind::Compile { unit: name.to_owned(), target: target.to_owned(), detail })
    };
    let text = |text: &str| CString::new(text).map_err(|_| failed("a zero in the text".to_owned()));
    let (source, file, arch) = (text(unit)?, text(name)?, text(&format!("--gpu-architecture={target}"))?);
    let options = OPTIONS.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
    let options: Vec<*const c_char> =
        core::iter::once(&arch).chain(&options).map(|option| option.as_ptr()).collect();

    let mut program = Compilation { table, program: ptr::null_mut() };
    let check = |call: &str, code: c_int| match code {
        0 => Ok(()),
        code => {
            // SAFETY: any code may be asked for.
            let reason = unsafe { (table.error_string)(code) };
            // SAFETY: the library's strings are constants.
            let reason = unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned();
            Err(failed(format!("{call}: {reason}")))
        }
    };
    // SAFETY: texts end in zeros and live until the program has been compiled.
    let code = unsafe {
        (table.create)(&mut program.program, source.as_ptr(), file.as_ptr(), 0, ptr::null(), ptr::null())
    };
    check("nvrtcCreateProgram", code)?;
    // SAFETY: as above.
    let code = unsafe { (table.compile)(program.program, options.len() as c_int, options.as_ptr()) };
    if code != 0 {
        return Err(failed(program.log()));
    }
    let mut size = 0;
    // SAFETY: the pointer is to a local.
    check("nvrtcGetCUBINSize", unsafe { (table.cubin_size)(program.program, &mut size) })?;
    let mut object = vec![0_u8; size];
    // SAFETY: the buffer has the size that was asked for.
    check("nvrtcGetCUBIN", unsafe { (table.cubin)(program.program, object.as_mut_ptr().cast()) })?;
    Ok(object)
}

/// A program of the library, destroyed when dropped.
struct Compilation {
    table: &'static Table,
    program: Program,
}

impl Compilation {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the pointer is to a local.
        unsafe { (self.table.log_size)(self.program, &mut size) };
        let mut log = vec![0_u8; size];
        // SAFETY: the buffer has the size that was asked for.
        unsafe { (self.table.log)(self.program, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }
}

impl Drop for Compilation {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made by the library and not used again.
            unsafe { (self.table.destroy)(&mut self.program) };
        }
    }
}
