"""Models for slime: small random ones, shapes of public models, conversion between formats, images and videos."""
