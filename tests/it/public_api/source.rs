//! Just enough of Rust's syntax to list items.

/// Source text without comments and literals, one space for any white space.
pub(super) fn clean(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let (mut out, mut at) = (String::new(), 0);
    while at < chars.len() {
        let rest = &chars[at..];
        if rest.starts_with(&['/', '/']) {
            while at < chars.len() && chars[at] != '\n' {
                at += 1;
            }
        } else if rest[0] == '"' {
            out.push('"');
            at += 1;
            while at < chars.len() && chars[at] != '"' {
                at += if chars[at] == '\\' { 2 } else { 1 };
            }
            out.push('"');
            at += 1;
        } else if rest[0] == '\'' && (rest.get(1) == Some(&'\\') || rest.get(2) == Some(&'\'')) {
            // A character, not a lifetime.
            at += if rest[1] == '\\' { 3 } else { 2 };
            while at < chars.len() && chars[at] != '\'' {
                at += 1;
            }
            out.push_str("' '");
            at += 1;
        } else if rest[0].is_whitespace() {
            if !out.ends_with(' ') {
                out.push(' ');
            }
            at += 1;
        } else {
            out.push(rest[0]);
            at += 1;
        }
    }
    out
}

/// The end of what the bracket at the start of `text` opens, past the closing one.
pub(super) fn closing(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        depth += match c {
            '(' | '[' | '{' => 1,
            ')' | ']' | '}' => -1,
            _ => 0,
        };
        if depth == 0 {
            return at + c.len_utf8();
        }
    }
    text.len()
}

/// `text` split at the `separator`s outside of brackets, also pointed ones.
pub(super) fn split(text: &str, separator: char) -> Vec<String> {
    let (mut parts, mut part, mut depth, mut before) = (Vec::new(), String::new(), 0, ' ');
    for c in text.chars() {
        depth += match c {
            '(' | '[' | '{' | '<' => 1,
            '>' if before == '-' || before == '=' => 0,
            ')' | ']' | '}' | '>' => -1,
            _ => 0,
        };
        match c == separator && depth == 0 {
            true => parts.push(std::mem::take(&mut part)),
            false => part.push(c),
        }
        before = c;
    }
    parts.push(part);
    parts.iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// An item: its attributes, what stands before its body, and the body between its braces.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) attributes: String,
    pub(super) head: String,
    pub(super) body: String,
}

const KINDS: [&str; 8] = ["fn", "struct", "enum", "trait", "type", "const", "static", "mod"];

impl Item {
    pub(super) fn is_public(&self) -> bool {
        self.head.starts_with("pub ")
    }

    pub(super) fn is_for_tests(&self) -> bool {
        self.attributes.contains("cfg(test)")
    }

    /// What the listing writes before the item: hidden items can be named, and so are listed too.
    pub(super) fn mark(&self) -> &'static str {
        if self.attributes.contains("doc(hidden)") { "#[doc(hidden)] " } else { "" }
    }

    /// Such as `fn` and `new`.
    pub(super) fn name(&self) -> Option<(&'static str, &str)> {
        let words = self.head.split(|c: char| !c.is_alphanumeric() && c != '_');
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        let start = usize::from(words.first() == Some(&"pub"));
        for (at, word) in words.iter().enumerate().skip(start) {
            let kind = KINDS.iter().find(|kind| *kind == word);
            let next = words.get(at + 1)?;
            match kind {
                Some(&"const") if *next == "fn" => {}
                Some(kind) => return Some((kind, next)),
                None if ["unsafe", "const", "async", "crate", "super"].contains(word) => {}
                None => return None,
            }
        }
        None
    }
}

/// The items of a module, an impl or a trait, those of a macro's last arm among them.
pub(super) fn items(mut text: &str) -> Vec<Item> {
    let mut items = Vec::new();
    loop {
        text = text.trim_start_matches([' ', ';', ',']);
        let mut attributes = String::new();
        while text.starts_with('#') {
            let open = text.find('[').expect("an attribute has brackets");
            let end = open + closing(&text[open..]);
            attributes.push_str(&text[..end]);
            text = text[end..].trim_start();
        }
        if text.is_empty() {
            return items;
        }
        let semicolon = {
            let words = text.strip_prefix("pub").unwrap_or(text);
            let words = if words.starts_with('(') { &words[closing(words)..] } else { words };
            let words = words.trim_start();
            ["use ", "type ", "static "].iter().any(|kind| words.starts_with(kind))
                || words.starts_with("const ") && !words.starts_with("const fn ")
        };
        let (mut at, mut body) = (0, String::new());
        while at < text.len() {
            let c = text[at..].chars().next().expect("within the text");
            match c {
                ';' => break,
                '{' if !semicolon => {
                    let end = at + closing(&text[at..]);
                    body = text[at + 1..end.max(at + 2) - 1].trim().to_owned();
                    break;
                }
                '(' | '[' | '{' => at += closing(&text[at..]),
                c => at += c.len_utf8(),
            }
        }
        let head = text[..at].trim().to_owned();
        let past = if text[at..].starts_with('{') { closing(&text[at..]) } else { 1 };
        text = text.get(at + past..).unwrap_or_default();
        if head.starts_with("macro_rules!") {
            if let Some(arm) = body.rfind("=> {") {
                let arm = &body[body.find("=> {").unwrap_or(arm) + 3..];
                items.extend(self::items(&arm[1..closing(arm) - 1]));
            }
            continue;
        }
        items.push(Item { attributes, head, body });
    }
}

/// The length of what the `<` at the start of `text` opens.
pub(super) fn pointed(text: &str) -> usize {
    let (mut depth, mut before) = (0, ' ');
    for (at, c) in text.char_indices() {
        depth += match c {
            '<' => 1,
            '>' if before != '-' && before != '=' => -1,
            _ => 0,
        };
        if depth == 0 {
            return at + 1;
        }
        before = c;
    }
    text.len()
}

pub(super) fn without_attributes(mut text: &str) -> &str {
    while text.starts_with('#') {
        let open = text.find('[').unwrap_or_default();
        text = text[open + closing(&text[open..])..].trim_start();
    }
    text
}
