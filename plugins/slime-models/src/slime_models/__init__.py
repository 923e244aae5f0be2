"""Models for slime: small random ones, presets of published shapes, conversion between formats, images and videos."""
