//! How structs cross the border while both sides grow: each copies the fields that the other one knows too.

/// Where a field lies.
#[derive(Clone, Copy, Debug)]
pub struct FieldLayout {
    /// Its name in the header.
    pub name: &'static str,
    /// Bytes from the start of the struct.
    pub offset: usize,
    /// Its bytes.
    pub bytes: usize,
}

/// Where the fields of a struct lie.
#[derive(Clone, Copy, Debug)]
pub struct StructLayout {
    /// Its name in the header.
    pub name: &'static str,
    /// Its size in this version.
    pub bytes: usize,
    /// Its fields, in order.
    pub fields: &'static [FieldLayout],
}

impl StructLayout {
    /// Bytes of a struct of `size` bytes that are whole fields of this version.
    pub fn covered(&self, size: usize) -> usize {
        let ends = self.fields.iter().map(|field| field.offset + field.bytes);
        ends.take_while(|end| *end <= size).last().unwrap_or(0)
    }
}

/// A struct of the header.
///
/// # Safety
/// The struct is `repr(C)`, begins with its size as a `u32`, is valid when all its bytes are 0, and `LAYOUT` tells
/// where its fields lie.
pub unsafe trait AbiStruct: Copy {
    /// Where the fields lie.
    const LAYOUT: &'static StructLayout;

    /// All 0, apart from the size.
    fn new() -> Self {
        let mut new = std::mem::MaybeUninit::<Self>::zeroed();
        // SAFETY: the struct begins with its size, and is valid when the rest is 0.
        unsafe {
            new.as_mut_ptr().cast::<u32>().write(Self::LAYOUT.bytes as u32);
            new.assume_init()
        }
    }

    /// The size that the struct gives itself.
    fn size(&self) -> usize {
        // SAFETY: the struct begins with its size.
        unsafe { (&raw const *self).cast::<u32>().read() as usize }
    }

    /// Copies a struct of the other side, which may know fewer or more fields: missing ones are 0, and the size of the
    /// copy says how much was there of this version. `None` for a pointer that is NULL or not aligned, and for a struct
    /// without a size.
    ///
    /// # Safety
    /// A pointer that is neither NULL nor misaligned points to a `u32`, and as many bytes as that says can be read.
    unsafe fn read(from: *const Self) -> Option<Self> {
        if from.is_null() || !from.is_aligned() {
            return None;
        }
        // SAFETY: the caller vouches for the size.
        let size = unsafe { from.cast::<u32>().read() } as usize;
        let covered = Self::LAYOUT.covered(size);
        if covered == 0 {
            return None;
        }
        let mut copy = Self::new();
        // SAFETY: `covered` is at most the size of either struct, and fields of all kinds are valid as they come from
        // the other side: integers, floats and pointers.
        unsafe {
            std::ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut copy).cast(), covered);
            (&raw mut copy).cast::<u32>().write(covered as u32);
        }
        Some(copy)
    }

    /// Fills a struct of the other side with the fields that it knows; its size stays. Nothing happens when the pointer
    /// is NULL or not aligned.
    ///
    /// # Safety
    /// As for [`AbiStruct::read`], for bytes that can be written.
    unsafe fn write(&self, to: *mut Self) {
        if to.is_null() || !to.is_aligned() {
            return;
        }
        const SIZE: usize = size_of::<u32>();
        // SAFETY: the caller vouches for the size.
        let size = unsafe { to.cast::<u32>().read() } as usize;
        let bytes = Self::LAYOUT.covered(size).saturating_sub(SIZE);
        // SAFETY: the bytes after the size lie within both structs.
        unsafe {
            let from = (&raw const *self).cast::<u8>().add(SIZE);
            std::ptr::copy_nonoverlapping(from, to.cast::<u8>().add(SIZE), bytes);
        }
    }
}

/// Declares a struct of the header with the offset of each field; what is written here and what the compiler makes of
/// it are compared when the crate is compiled.
macro_rules! abi_struct {
    (
        $(#[$doc:meta])*
        $name:ident = $c_name:literal, $size:literal { $($offset:literal $field:ident: $type:ty,)* }
    ) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $(pub $field: $type,)*
        }

        const _: () = {
            assert!(size_of::<$name>() == $size, "neuropil plugins need a 64-bit machine");
            $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
        };

        // SAFETY: the struct is `repr(C)`, its first field is its size, and integers, floats, pointers and optional
        // functions are valid when they are 0.
        unsafe impl AbiStruct for $name {
            const LAYOUT: &'static crate::StructLayout = &crate::StructLayout {
                name: $c_name,
                bytes: $size,
                fields: &[$(crate::FieldLayout {
                    name: stringify!($field),
                    offset: $offset,
                    bytes: size_of::<$type>(),
                }),*],
            };
        }
    };
}

pub(crate) use abi_struct;

#[cfg(test)]
mod tests {
    use crate::{AbiStruct, NpDeviceInfo, NpReport, NpStatus};

    #[test]
    fn what_the_other_side_does_not_know_is_zero() {
        let mut info = NpDeviceInfo::new();
        assert_eq!((info.size(), info.kind), (112, 0));
        (info.kind, info.memory_bytes, info.flags, info.memory_kinds) = (3, 77, 1, 2);
        for (size, want) in
            [(112, (3, 77, 1, 2)), (84, (3, 77, 1, 0)), (83, (3, 77, 0, 0)), (79, (3, 0, 0, 0))]
        {
            info.size = size;
            // SAFETY: the struct is a whole one.
            let copy = unsafe { NpDeviceInfo::read(&info) }.unwrap();
            assert_eq!((copy.kind, copy.memory_bytes, copy.flags, copy.memory_kinds), want, "{size}");
        }
        info.size = 4000;
        // SAFETY: no more than a whole struct is read.
        assert_eq!(unsafe { NpDeviceInfo::read(&info) }.unwrap().size, 112);
        for size in 0..4 {
            info.size = size;
            // SAFETY: as above.
            assert!(unsafe { NpDeviceInfo::read(&info) }.is_none());
        }
        // SAFETY: NULL is checked.
        assert!(unsafe { NpDeviceInfo::read(std::ptr::null()) }.is_none());
    }

    #[test]
    fn a_shorter_struct_is_filled_as_far_as_it_goes() {
        let report = NpReport { size: 16, flags: 3, device_ns: 9 };
        let mut short = NpReport { size: 8, flags: 0, device_ns: 0 };
        // SAFETY: the struct is a whole one.
        unsafe { report.write(&mut short) };
        assert_eq!((short.size, short.flags, short.device_ns), (8, 3, 0));
        // SAFETY: NULL is checked.
        unsafe { NpStatus::new().write(std::ptr::null_mut()) };
    }
}
