//! The pointwise operators: a variant for each row of the table.

use super::table::pointwise;

macro_rules! operators {
    ([] $(
        $(#[$doc:meta])* $name:ident => $variant:ident (
            $($parameter:ident: $type:ty = $sample:literal),*
        ), $policy:tt, $facts:tt, $arithmetic:tt;
    )*) => {
        /// A pointwise operator: a row of the table, with its parameters.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub(crate) enum Pointwise {
            $($(#[$doc])* $variant { $($parameter: f64),* },)*
        }

        impl Pointwise {
            /// The number of its row, which is that of its line in `activation.cu`, and its parameters, which are
            /// two at most.
            pub(super) fn number(self) -> (i32, [f64; 2]) {
                enum RowNumber { $($variant),* }
                let mut parameters = [0.0; 2];
                let row = match self {
                    $(Self::$variant { $($parameter),* } => {
                        let given: &[f64] = &[$($parameter),*];
                        parameters.iter_mut().zip(given).for_each(|(to, from)| *to = *from);
                        RowNumber::$variant
                    })*
                };
                (row as i32, parameters)
            }
        }
    };
}
pointwise!(operators []);
