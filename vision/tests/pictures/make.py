"""Makes the pictures of this folder and what Pillow reads from them.

`pip install pillow==12.0.0 numpy`, then `python3 make.py`.

NAME.EXT is a picture file, NAME.EXT.rgb its size (two 16-bit little-endian numbers) and its pixels over white, as Pillow
decodes them; for 16-bit PNGs, which Pillow cuts to 8 bits, numpy's exact rounding. `resize.txt` holds SHA-256 digests of
what Pillow's bicubic resize makes of a formula's pixels, and `fit.txt` what transformers' size rule makes of sizes. In `large` are
files of a million pixels.

Pillow 13 filters pictures that lose much more height than width in the other order (pull request 9549), so that their
digests differ.
"""

import hashlib
import io
import math
import os
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

W, H = 13, 9


def pattern(seed=0, channels=3):
    """Smooth, and the same under no turn or flip."""
    y, x = np.mgrid[0:H, 0:W]
    planes = [127 + 120 * np.sin(seed + (c + 1) * 0.21 * x + 0.17 * (3 - c) * y + c) for c in range(channels)]
    return np.stack(planes, -1).round().astype(np.uint8)


def save_rgb(name, rgb):
    height, width, _ = rgb.shape
    with open(f"{name}.rgb", "wb") as f:
        f.write(struct.pack("<HH", width, height) + rgb.astype(np.uint8).tobytes())


def over_white(image):
    image = ImageOps.exif_transpose(image)
    if image.mode == "CMYK" or "A" not in image.getbands() and "transparency" not in image.info:
        return np.asarray(image.convert("RGB"))
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return np.asarray(white)


def put(name, data):
    with open(name, "wb") as f:
        f.write(data)
    image = Image.open(io.BytesIO(data))
    image.seek(0)
    save_rgb(name, over_white(image))


def encoded(image, form, **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, color, rows, extra=b"", interlace=0):
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    return (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + extra
            + png_chunk(b"IDAT", zlib.compress(rows, 9)) + png_chunk(b"IEND", b""))


def rows16(values):
    return b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)


def adam7(rgb):
    out = b""
    for x0, y0, dx, dy in [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]:
        part = rgb[y0::dy, x0::dx]
        if part.size:
            out += b"".join(b"\0" + row.tobytes() for row in part)
    return out


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def pngs():
    rgb = pattern()
    put("rgb.png", encoded(Image.fromarray(rgb), "PNG"))
    # Colours hidden under full transparency, and everything in between.
    rgba = np.dstack([rgb, (np.arange(H * W).reshape(H, W) * 5 % 256).astype(np.uint8)])
    rgba[0:3, :, 3] = 0
    put("rgba.png", encoded(Image.fromarray(rgba), "PNG"))
    palette = Image.fromarray(rgb).quantize(16)
    put("palette.png", encoded(palette, "PNG"))
    put("palette-transparent.png", encoded(palette, "PNG", transparency=bytes(range(0, 256, 16))))
    grey = Image.fromarray(rgb[..., 0])
    put("grey.png", encoded(grey, "PNG"))
    put("bits.png", encoded(grey.convert("1"), "PNG"))
    put("grey-alpha.png", encoded(Image.merge("LA", [grey, Image.fromarray(rgba[..., 3])]), "PNG"))
    put("colour-key.png", png(2, 1, 8, 2, bytes([0, 9, 8, 7, 1, 2, 3]), png_chunk(b"tRNS", struct.pack(">HHH", 9, 8, 7))))
    put("interlaced.png", png(W, H, 8, 2, adam7(rgb), interlace=1))
    put("turned-png.png", encoded(Image.fromarray(rgb), "PNG", exif=exif(6)))
    frames = [Image.fromarray(pattern(seed)) for seed in (1, 2, 3)]
    put("animated-png.png", encoded(frames[0], "PNG", save_all=True, append_images=frames[1:], duration=50))

    rng = np.random.default_rng(7)
    wide = rng.integers(0, 65536, (H, W, 4))
    wide[0, :4, 3] = [0, 1, 65534, 65535]
    flat = lambda v: np.floor(v / 257 + 0.5)
    alpha = wide[..., 3:].astype(object)
    over = lambda v: np.array((2 * 255 * (v.astype(object) * alpha + 65535 * (65535 - alpha)) + 65535**2) // (2 * 65535**2), dtype=np.int64)
    for name, color, planes, seen in [
        ("grey16", 0, [0], flat(wide[..., [0, 0, 0]])), ("rgb16", 2, [0, 1, 2], flat(wide[..., :3])),
        ("grey-alpha16", 4, [0, 3], over(wide[..., [0, 0, 0]])), ("rgba16", 6, [0, 1, 2, 3], over(wide[..., :3])),
    ]:
        with open(f"{name}.png", "wb") as f:
            f.write(png(W, H, 16, color, rows16(wide[..., planes])))
        save_rgb(f"{name}.png", seen)


def jpegs():
    image = Image.fromarray(pattern())
    put("rgb.jpg", encoded(image, "JPEG", quality=90, subsampling=0))
    put("subsampled.jpg", encoded(image, "JPEG", quality=90, subsampling=2))
    put("progressive.jpg", encoded(image, "JPEG", quality=90, progressive=True, subsampling=0))
    put("restarts.jpg", encoded(image, "JPEG", quality=90, subsampling=0, restart_marker_blocks=1))
    put("grey.jpg", encoded(image.convert("L"), "JPEG", quality=90))
    put("untransformed.jpg", encoded(image, "JPEG", quality=90, keep_rgb=True))
    cmyk = Image.fromarray(pattern(1, 4), "CMYK")
    data = encoded(cmyk, "JPEG", quality=90)
    put("cmyk.jpg", data)
    at = data.index(b"Adobe") - 4
    put("cmyk-unmarked.jpg", data[:at] + data[at + 16:])
    put("icc.jpg", encoded(image, "JPEG", quality=90, subsampling=0, icc_profile=bytes(range(200))))
    for turn in range(1, 9):
        put(f"turned-{turn}.jpg", encoded(image, "JPEG", quality=90, subsampling=0, exif=exif(turn)))


def webps():
    image = Image.fromarray(pattern())
    rgba = np.dstack([pattern(), pattern(2)[..., 0]])
    put("lossy.webp", encoded(image, "WEBP", quality=80))
    put("lossless.webp", encoded(image, "WEBP", lossless=True))
    put("alpha.webp", encoded(Image.fromarray(rgba), "WEBP", lossless=True, exact=True))
    put("lossy-alpha.webp", encoded(Image.fromarray(rgba), "WEBP", quality=80))
    put("turned-webp.webp", encoded(image, "WEBP", lossless=True, exif=exif(8)))
    frames = [Image.fromarray(pattern(seed)) for seed in (1, 2)]
    put("animated-webp.webp", encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True))


def gifs():
    frames = [Image.fromarray(pattern(seed)).quantize(16) for seed in (1, 2)]
    put("still.gif", encoded(frames[0], "GIF"))
    put("transparent.gif", encoded(frames[0], "GIF", transparency=3))
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    put("animated-gif.gif", data)
    # The same frame on a wider canvas, which shows through.
    still = encoded(frames[0], "GIF")
    with open("canvas.gif", "wb") as f:
        f.write(still[:6] + struct.pack("<HH", W + 3, H + 2) + still[10:])
    seen = np.full((H + 2, W + 3, 3), 255, np.uint8)
    seen[:H, :W] = np.asarray(frames[0].convert("RGB"))
    save_rgb("canvas.gif", seen)


def larges():
    """Files whose memory is measured: many pixels in few bytes."""
    os.makedirs("large", exist_ok=True)
    flat = Image.new("RGBA", (1000, 1000), (10, 20, 30, 128))
    flats = [flat, Image.new("RGBA", (1000, 1000), (90, 20, 30, 128))]
    for name, data in [
        ("cmyk-progressive.jpg", encoded(Image.new("CMYK", (1000, 1000)), "JPEG", progressive=True, quality=30)),
        ("turned.jpg", encoded(flat.convert("L"), "JPEG", progressive=True, quality=30, exif=exif(6))),
        ("alpha.webp", encoded(flat, "WEBP", lossless=True)),
        ("lossy-alpha.webp", encoded(flat, "WEBP", quality=50)),
        ("animated.webp", encoded(flats[0], "WEBP", save_all=True, append_images=flats[1:], lossless=True)),
        ("still.gif", encoded(flat.convert("RGB").quantize(4), "GIF")),
    ]:
        with open(f"large/{name}", "wb") as f:
            f.write(data)


def formula(width, height):
    """Bytes of a picture of any size: noise with flat areas, so that the filter overshoots."""
    n = np.arange(width * height * 3, dtype=np.uint64)
    noise = (n * np.uint64(2654435761) >> np.uint64(13)) & np.uint64(0xFF)
    kind = (n // np.uint64(3 * 7)) % np.uint64(3)
    return np.choose(kind.astype(int), [noise, np.uint64(255) * (noise > 127), np.zeros_like(noise)]).astype(np.uint8).reshape(height, width, 3)


def digest(rgb):
    height, width, _ = rgb.shape
    return hashlib.sha256(struct.pack("<QQ", width, height) + rgb.tobytes()).hexdigest()


def resizes():
    sizes = [
        (1, 1, 48, 48), (2, 2, 7, 5), (3, 3, 240, 240), (47, 53, 720, 816), (13, 9, 13, 30), (13, 9, 40, 9), (13, 9, 13, 9),
        (100, 80, 48, 48), (97, 61, 48, 96), (640, 480, 912, 672), (640, 480, 96, 48), (1000, 750, 432, 336),
        (1, 2000, 48, 1344), (2000, 1, 1344, 48), (3, 5000, 48, 240), (801, 3, 48, 3), (17, 33, 16, 32), (65, 16, 64, 17),
    ]
    with open("resize.txt", "w") as f:
        f.write("# width height, new width and height, digest of the result\n")
        for width, height, to_width, to_height in sizes:
            image = Image.fromarray(formula(width, height)).resize((to_width, to_height), Image.Resampling.BICUBIC)
            f.write(f"{width} {height} {to_width} {to_height} {digest(np.asarray(image))}\n")


def fit(height, width, soft_tokens, patch=16, pooling=3):
    # As in transformers, models/gemma4/image_processing_gemma4.py.
    cell, patches = patch * pooling, soft_tokens * pooling**2
    factor = math.sqrt(patches * patch**2 / (height * width))
    to = [int(math.floor(factor * side / cell)) * cell for side in (height, width)]
    assert to != [0, 0]
    longest = patches // pooling**2 * cell
    if to[0] == 0:
        to = [cell, min(int(math.floor(width / height)) * cell, longest)]
    elif to[1] == 0:
        to = [min(int(math.floor(height / width)) * cell, longest), cell]
    assert to[0] * to[1] <= patches * patch**2
    return to


def fits():
    rng = np.random.default_rng(11)
    sides = [1, 2, 47, 48, 49, 53, 96, 100, 224, 280, 336, 480, 640, 768, 1080, 1920, 2000, 3024, 4032, 8160, 65535]
    with open("fit.txt", "w") as f:
        f.write("# budget, width height, new width and height\n")
        for budget in (70, 140, 280, 560, 1120):
            for _ in range(120):
                width, height = int(rng.choice(sides)), int(rng.choice(sides))
                if rng.random() < 0.5:
                    width, height = int(rng.integers(1, 5000)), int(rng.integers(1, 5000))
                # Sides at which the rounding is at stake.
                if rng.random() < 0.2:
                    columns = int(rng.integers(1, budget + 1))
                    scale = int(rng.integers(1, 9))
                    width, height = columns * scale, max(1, budget // columns) * scale
                to_height, to_width = fit(height, width, budget)
                f.write(f"{budget} {width} {height} {to_width} {to_height}\n")


pngs()
jpegs()
webps()
gifs()
larges()
resizes()
fits()
