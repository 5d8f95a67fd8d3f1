//! The exported C functions, under their real names. They read what pointers point to, and leave the rules to the modules
//! behind them.
//!
//! Every function takes pointers that a client vouches for as the interface describes: NULL where it is refused or
//! allowed, else something of the stated type and count. Handles are the exception: any number may be passed.

#![allow(non_snake_case)]

pub mod compilation;
pub mod device;
pub mod execution;
pub mod memory;
pub mod model;

use std::ffi::c_void;

use crate::codes::*;
use crate::world::{World, call, give, pointer};

/// Runs the body of a function that makes an object. The client's slot is NULL unless the object was made.
///
/// # Safety
/// `slot` is NULL or may be written.
unsafe fn create(
    function: &'static str,
    slot: *mut *mut c_void,
    body: impl FnOnce(&mut World) -> Outcome<usize>,
) -> i32 {
    call(function, |world| {
        // SAFETY: as the caller vouches.
        unsafe { give(slot, std::ptr::null_mut()) }?;
        let handle = body(world)?;
        // SAFETY: as before.
        unsafe { give(slot, pointer(handle)) }
    })
}

/// A truth value as C passes it.
fn truth(value: u8) -> Outcome<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(BAD_DATA),
    }
}
