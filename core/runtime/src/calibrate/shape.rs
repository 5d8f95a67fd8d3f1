//! The layers of a store in numbers, which stay the same from one version of the file to the next.

use crate::store::{Store, StoreLayer, bundle_name};

/// What a calibration has to know of a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerShape {
    /// Neurons, of each expert.
    pub neurons: usize,
    /// Elements of a row.
    pub width: usize,
    /// Experts; 1 without.
    pub experts: usize,
    /// Whether tensors are named by expert. A layer can have a single one and be so too.
    pub numbered: bool,
}

impl LayerShape {
    /// Of the layers of a store.
    pub(super) fn all(store: &Store) -> Vec<LayerShape> {
        store.layers.iter().enumerate().map(|(index, layer)| LayerShape::of(index, layer)).collect()
    }

    fn of(index: usize, layer: &StoreLayer) -> LayerShape {
        let plain = bundle_name(index, None);
        LayerShape {
            neurons: layer.layout.neurons,
            width: layer.layout.width,
            experts: layer.bundles.len(),
            numbered: layer.bundles.first().is_some_and(|bundles| bundles.name != plain),
        }
    }

    /// What the names of an expert's tensors have after their part.
    pub(super) fn suffix(&self, expert: usize) -> String {
        if self.numbered { format!(".{expert}") } else { String::new() }
    }
}
