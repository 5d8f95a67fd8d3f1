//! What JSON says of tensors, read straight into the few numbers that are needed.
//!
//! A tree of a document takes many times its bytes, and these documents are untrusted and may be large. So nothing is kept
//! but names and numbers, and no more of them than a model can have.

use std::collections::BTreeSet;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The most files of a model, the most tensors of a file, and the most dimensions of a tensor.
const MAX_FILES: usize = 1024;
pub(super) const MAX_ENTRIES: usize = 1 << 18;
const MAX_DIMS: usize = 4;

/// The tensors of a file, in its order.
pub(super) struct Header(pub Vec<(String, Declared)>);

/// What a header says of a tensor.
#[derive(Default)]
pub(super) struct Declared {
    pub dtype: Option<String>,
    pub shape: Option<Vec<u64>>,
    pub offsets: Option<Vec<u64>>,
}

/// The names of the files that an index lists.
pub(super) struct Index(pub BTreeSet<String>);

/// A type that is made from the pairs of an object.
trait FromPairs<'de>: Sized {
    const WHAT: &'static str;
    fn read<A: MapAccess<'de>>(map: A) -> Result<Self, A::Error>;
}

struct Pairs<T>(PhantomData<T>);

impl<'de, T: FromPairs<'de>> Visitor<'de> for Pairs<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::WHAT)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::read(map)
    }
}

impl<'de> FromPairs<'de> for Header {
    const WHAT: &'static str = "an object of tensors";

    fn read<A: MapAccess<'de>>(mut map: A) -> Result<Header, A::Error> {
        let mut all = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else if all.len() == MAX_ENTRIES {
                return Err(A::Error::custom("too many tensors"));
            } else {
                all.push((name, map.next_value()?));
            }
        }
        Ok(Header(all))
    }
}

impl<'de> FromPairs<'de> for Declared {
    const WHAT: &'static str = "the type, shape and place of a tensor";

    fn read<A: MapAccess<'de>>(mut map: A) -> Result<Declared, A::Error> {
        let mut declared = Declared::default();
        while let Some(key) = map.next_key::<String>()? {
            match &*key {
                "dtype" => declared.dtype = Some(map.next_value()?),
                "shape" => declared.shape = Some(map.next_value::<Numbers>()?.0),
                "data_offsets" => declared.offsets = Some(map.next_value::<Numbers>()?.0),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(declared)
    }
}

impl<'de> FromPairs<'de> for Index {
    const WHAT: &'static str = "an object with a weight_map";

    fn read<A: MapAccess<'de>>(mut map: A) -> Result<Index, A::Error> {
        let mut files = BTreeSet::new();
        while let Some(key) = map.next_key::<String>()? {
            match &*key {
                "weight_map" => files = map.next_value::<FileNames>()?.0,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Index(files))
    }
}

/// The files of a weight map.
struct FileNames(BTreeSet<String>);

impl<'de> FromPairs<'de> for FileNames {
    const WHAT: &'static str = "an object from tensors to files";

    fn read<A: MapAccess<'de>>(mut map: A) -> Result<FileNames, A::Error> {
        let mut files = BTreeSet::new();
        while let Some((_, file)) = map.next_entry::<IgnoredAny, String>()? {
            files.insert(file);
            if files.len() > MAX_FILES {
                return Err(A::Error::custom("too many files"));
            }
        }
        Ok(FileNames(files))
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Declared {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Declared, D::Error> {
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Index, D::Error> {
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

impl<'de> Deserialize<'de> for FileNames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<FileNames, D::Error> {
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

/// A few whole numbers.
struct Numbers(Vec<u64>);

impl<'de> Visitor<'de> for Numbers {
    type Value = Numbers;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MAX_DIMS} whole numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<Numbers, A::Error> {
        while let Some(number) = list.next_element()? {
            if self.0.len() == MAX_DIMS {
                return Err(A::Error::custom("more than four numbers for a tensor"));
            }
            self.0.push(number);
        }
        Ok(self)
    }
}

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Numbers, D::Error> {
        deserializer.deserialize_seq(Numbers(Vec::new()))
    }
}
