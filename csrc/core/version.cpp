// Placeholder translation unit so that the library is never empty.
