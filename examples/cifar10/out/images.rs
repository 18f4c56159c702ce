//! Images as PNG.

use anyhow::Result;
use base64::{Engine, engine::general_purpose::STANDARD};

use crate::data::{PLANE, SIDE};

/// A PNG of an image whose red, green and blue lie one after the other.
pub(crate) fn png(image: &[u8]) -> Result<Vec<u8>> {
    let pixels: Vec<u8> =
        (0..PLANE).flat_map(|at| [image[at], image[PLANE + at], image[2 * PLANE + at]]).collect();
    png_of_pixels(&pixels, (SIDE as u32, SIDE as u32))
}

/// A PNG of pixels whose red, green and blue lie together.
pub(crate) fn png_of_pixels(pixels: &[u8], (width, height): (u32, u32)) -> Result<Vec<u8>> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(pixels)?;
    Ok(file)
}

/// The address of a PNG that is a part of the page.
pub(crate) fn data_uri(png: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(png))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{rng::Stream, synthetic};

    #[test]
    fn a_png_holds_the_image() -> Result<()> {
        let images = synthetic::draw(Stream::DrawTest, 1, 3);
        let image = images.image(0);
        let file = png(image)?;
        let mut reader = png::Decoder::new(std::io::Cursor::new(&file)).read_info()?;
        let mut pixels = vec![0; 3 * PLANE];
        let info = reader.next_frame(&mut pixels)?;
        assert_eq!((info.width, info.height), (SIDE as u32, SIDE as u32));
        for at in [0, 1, SIDE, PLANE - 1] {
            let expected = [image[at], image[PLANE + at], image[2 * PLANE + at]];
            assert_eq!(pixels[3 * at..][..3], expected, "pixel {at}");
        }
        assert!(data_uri(&file).starts_with("data:image/png;base64,iVBORw0KGgo"));
        Ok(())
    }
}
